package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/hashicorp/raft"
)

// chain is what one file of the journal holds.
type chain struct {
	last    uint64 // sequence of the last record; of a retired file, what it was
	top     uint64 // last index of the log after it
	highest uint64 // sequence of any sector
	end     int64
	changes []change
}

// readChain reads a file. Every sector must be good or never written.
func readChain(b []byte, id uint32) (chain, error) {
	var c chain
	for at := int64(0); at < int64(len(b)); at += sectorBytes {
		if at+sectorBytes > int64(len(b)) {
			break
		}
		switch s, kind := readSector(b[at:], id, at); kind {
		case sectorBad:
			return c, fmt.Errorf("sector at %d is damaged: %w", at, ErrCorruptLog)
		case sectorGood:
			c.highest = max(c.highest, s.number>>sequenceShift)
		}
	}
	for {
		r, ok := readRecord(b, c.end, id)
		if !ok || len(c.changes) > 0 && r.sequence != c.last+1 {
			return c, nil
		}
		if r.kind == recordRetired {
			if c.end == 0 {
				c.last, c.top = r.sequence, r.before
				return c, nil
			}
			return c, fmt.Errorf("record %d: end of the journal in its middle: %w", r.sequence, ErrCorruptLog)
		}
		if len(c.changes) > 0 && r.before != c.top {
			return c, fmt.Errorf("record %d follows entry %d, not %d: %w", r.sequence, r.before, c.top, ErrCorruptLog)
		}
		ch, err := r.parse()
		if err != nil {
			return c, fmt.Errorf("record %d: %w: %w", r.sequence, ErrCorruptLog, err)
		}
		c.last, c.top = r.sequence, ch.after()
		c.changes = append(c.changes, ch)
		c.end += r.room
	}
}

// record is one as it lies on the disk.
type record struct {
	kind     uint32
	sequence uint64
	before   uint64
	content  []byte
	room     int64
}

// readRecord reads the record at a place; false when none exists, or not all of one.
func readRecord(b []byte, at int64, id uint32) (record, bool) {
	var r record
	if at+sectorBytes > int64(len(b)) {
		return r, false
	}
	s, kind := readSector(b[at:], id, at)
	if kind != sectorGood || s.number&(1<<sequenceShift-1) != 0 {
		return r, false
	}
	head := b[at+sectorHead:]
	r.sequence = s.number >> sequenceShift
	r.kind = binary.LittleEndian.Uint32(head)
	length := int64(binary.LittleEndian.Uint32(head[4:]))
	r.before = binary.LittleEndian.Uint64(head[8:])
	sectors := sectorsFor(recordHead + length)
	r.room = sectors * sectorBytes
	if at+r.room > int64(len(b)) {
		return r, false
	}
	content := make([]byte, 0, sectors*sectorRoom)
	for i := range sectors {
		from := at + i*sectorBytes
		piece, kind := readSector(b[from:], id, from)
		if kind != sectorGood || piece.run != s.run || piece.number != s.number+uint64(i) {
			return r, false
		}
		content = append(content, b[from+sectorHead:from+sectorBytes]...)
	}
	r.content = slices.Clip(content[recordHead : recordHead+length])
	return r, true
}

var errShort = errors.New("content ends too soon")

// parse reads the content of a record.
func (r record) parse() (change, error) {
	ch := change{sequence: r.sequence, before: r.before}
	b := r.content
	switch r.kind {
	case recordDelete:
		if len(b) != 16 {
			return ch, errShort
		}
		ch.first, ch.last = binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])
		return ch, nil
	case recordTop:
		if len(b) != 8 {
			return ch, errShort
		}
		ch.top = binary.LittleEndian.Uint64(b)
		return ch, nil
	case recordEntries:
	default:
		return ch, fmt.Errorf("unknown kind %d", r.kind)
	}
	for len(b) > 0 {
		if len(b) < entryHead {
			return ch, errShort
		}
		l := &raft.Log{Index: binary.LittleEndian.Uint64(b), Term: binary.LittleEndian.Uint64(b[8:]), Type: raft.LogType(b[16])}
		extensions := int(b[17])
		l.AppendedAt = unstamp(int64(binary.LittleEndian.Uint64(b[18:])))
		data := int(binary.LittleEndian.Uint32(b[26:]))
		if b = b[entryHead:]; len(b) < extensions+data {
			return ch, errShort
		}
		l.Extensions, l.Data = b[:extensions:extensions], b[extensions:extensions+data:extensions+data]
		b = b[extensions+data:]
		ch.entries = append(ch.entries, l)
	}
	if len(ch.entries) == 0 {
		return ch, errors.New("no entries")
	}
	return ch, nil
}

// after is the last index of the log after a change.
func (c change) after() uint64 {
	switch {
	case c.top != 0:
		return c.top
	case len(c.entries) > 0:
		return c.entries[len(c.entries)-1].Index
	case c.first <= c.last && c.first > 0 && c.last >= c.before:
		return c.first - 1
	case c.last >= c.before:
		return 0
	default:
		return c.before
	}
}
