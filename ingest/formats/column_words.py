"""Words that columns of tables are called by, in English, German, French, Spanish, Italian and Dutch.

A row of texts behind an empty one names the columns of another table, or goes on with the one above. Where its looks
do not say which, these words do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_WORDS = frozenset(
    """
    account action address age amount answer area article assignee author balance bank batch birthday bought box brand
    branch budget building buyer capacity capital category chief city class client code colour color comment company
    condition contact contents contract cost country course currency customer date day deadline department depth
    description destination detail details device diameter direction discount district division document duration
    editor email employee end english event expiry family field file first floor format frequency from function
    gender german grade group head height hour hours id identifier index invoice item job key kind label language last
    leader length level limit link list location machine maker manager manufacturer mark material maximum meaning member
    method minimum mobile model month name nationality net no note notes number office operator option order origin
    owner page parameter part partner party payment period person phone place plan plant population port position post
    postcode price priority product profession project property province purpose quantity question rate rating reason
    receiver reference region remark remarks result role room rule salary sale score season sector sender serial series
    service sex shift ship site size source speaker species speed staff start state status step stock store
    street subject summary supervisor supplier surname symbol table target task tax team telephone term text time title
    to tool total town translation type unit unitprice url use user value variable vehicle vendor version volume
    website week weight width word year zip zone

    abteilung adresse alter anfang anzahl art aufgabe autor bemerkung beruf beschreibung bestand betrag datum dauer
    einheit ende ergebnis farbe firma frage gebiet gerät gewicht größe gruppe hersteller höhe jahr kategorie kosten
    kunde land länge leiter lieferant maschine menge mitarbeiter monat nachname name nummer ort person platz preis
    produkt projekt raum rolle schicht sprache stadt stand standort status straße stück stunden summe tag telefon termin
    thema titel typ umsatz uhrzeit verein vorname wert wohnort zeit ziel zimmer zweck

    adresse âge année auteur catégorie client couleur date description durée fournisseur groupe heure jour langue lieu
    longueur machine mois montant nom nombre numéro pays poids prénom prix produit projet quantité rôle rue salle
    service taille titre type unité valeur ville

    apellido año autor cantidad categoría ciudad cliente color descripción dirección edad empresa estado fecha grupo
    hora idioma lugar máquina mes nombre número país peso precio producto proyecto puesto región título tipo unidad
    valor

    anno autore categoria città cliente cognome colore data descrizione durata età fornitore gruppo indirizzo lingua
    luogo macchina mese nome numero ora paese peso prezzo prodotto progetto quantità ruolo squadra titolo tipo unità
    valore

    aantal adres afdeling achternaam bedrag beschrijving datum eenheid functie gewicht groep jaar kleur klant land
    leverancier maand naam nummer omschrijving plaats prijs product stad straat taal tijd titel uur voornaam waarde
    """.split()
)
_WORD = re.compile(r"[^\W\d_]+")


def name_columns(cells: Iterable[str]) -> bool:
    """Whether one of these texts has a word that columns are called by."""
    return any(word in _WORDS for cell in cells for word in _WORD.findall(cell.lower()))
