package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore/disk/sector"
)

// change is the decoded content of a record: entries, a deleted range, or a new end of the log.
type change struct {
	sequence    uint64
	before      uint64 // last index of the log before the record
	entries     []*raft.Log
	first, last uint64 // deleted range, for a record of kind recordDelete
	top         uint64 // last index of the log, for a record of kind recordTop
}

// chain is the decoded content of one file of the journal: the changes of its consecutive records.
type chain struct {
	last    uint64 // sequence number of the last record; set for a retired file, too
	top     uint64 // last index of the log after the last record
	highest uint64 // highest sequence number in any sector of the file, including an incomplete record
	end     int64
	changes []change
}

// readChain decodes b, the content of a file of the journal. A damaged sector is an error. id is
// the number of the log.
func readChain(b []byte, id uint32) (chain, error) {
	var c chain
	for at := int64(0); at < int64(len(b)); at += sector.Size {
		if at+sector.Size > int64(len(b)) {
			break
		}
		switch s, state := sector.CheckStamp(b[at:], id, at); state {
		case sector.Damaged:
			return c, fmt.Errorf("sector at %d is damaged: %w", at, sector.ErrCorruptLog)
		case sector.Valid:
			c.highest = max(c.highest, s.Number>>sequenceShift)
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
			return c, fmt.Errorf("record %d: end of the journal in its middle: %w", r.sequence, sector.ErrCorruptLog)
		}
		if len(c.changes) > 0 && r.before != c.top {
			return c, fmt.Errorf("record %d follows entry %d, not %d: %w",
				r.sequence, r.before, c.top, sector.ErrCorruptLog)
		}
		ch, err := r.decode()
		if err != nil {
			return c, fmt.Errorf("record %d: %w: %w", r.sequence, sector.ErrCorruptLog, err)
		}
		c.last, c.top = r.sequence, ch.topAfter()
		c.changes = append(c.changes, ch)
		c.end += r.size
	}
}

// record is a complete record as it is stored in a file, with undecoded content.
type record struct {
	kind     uint32
	sequence uint64
	before   uint64 // last index of the log before the record
	content  []byte
	size     int64 // total size of its sectors, in bytes
}

// readRecord reads the record at the given offset of b, the content of a file. It returns false if
// there is no complete record at that offset. id is the number of the log.
func readRecord(b []byte, offset int64, id uint32) (record, bool) {
	var r record
	if offset+sector.Size > int64(len(b)) {
		return r, false
	}
	s, state := sector.CheckStamp(b[offset:], id, offset)
	if state != sector.Valid || s.Number&(1<<sequenceShift-1) != 0 {
		return r, false
	}
	head := sector.Content(b[offset:])
	r.sequence = s.Number >> sequenceShift
	r.kind = binary.LittleEndian.Uint32(head)
	length := int64(binary.LittleEndian.Uint32(head[4:]))
	r.before = binary.LittleEndian.Uint64(head[8:])
	sectors := sector.CountFor(recordHead + length)
	r.size = sectors * sector.Size
	if offset+r.size > int64(len(b)) {
		return r, false
	}
	content := make([]byte, 0, sectors*sector.ContentSize)
	for i := range sectors {
		from := offset + i*sector.Size
		piece, state := sector.CheckStamp(b[from:], id, from)
		if state != sector.Valid || piece.Run != s.Run || piece.Number != s.Number+uint64(i) {
			return r, false
		}
		content = append(content, sector.Content(b[from:])...)
	}
	r.content = slices.Clip(content[recordHead : recordHead+length])
	return r, true
}

var errTruncated = errors.New("the content is truncated")

// decode returns the change that the content of the record describes.
func (r record) decode() (change, error) {
	ch := change{sequence: r.sequence, before: r.before}
	b := r.content
	switch r.kind {
	case recordDelete:
		if len(b) != 16 {
			return ch, errTruncated
		}
		ch.first, ch.last = binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])
		return ch, nil
	case recordTop:
		if len(b) != 8 {
			return ch, errTruncated
		}
		ch.top = binary.LittleEndian.Uint64(b)
		return ch, nil
	case recordEntries:
	default:
		return ch, fmt.Errorf("unknown kind %d", r.kind)
	}
	for len(b) > 0 {
		if len(b) < entryHead {
			return ch, errTruncated
		}
		l := &raft.Log{
			Index: binary.LittleEndian.Uint64(b), Term: binary.LittleEndian.Uint64(b[8:]), Type: raft.LogType(b[16]),
		}
		extensions := int(b[17])
		l.AppendedAt = decodeTime(int64(binary.LittleEndian.Uint64(b[18:])))
		data := int(binary.LittleEndian.Uint32(b[26:]))
		if b = b[entryHead:]; len(b) < extensions+data {
			return ch, errTruncated
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

// topAfter returns the last index of the log after a change. 0 means that the log is empty.
func (c change) topAfter() uint64 {
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
