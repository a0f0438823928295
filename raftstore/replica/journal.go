package replica

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/hashicorp/raft"
)

// journal is two files written in turn, each from its beginning, one record
// after the other. A record is durable when append returns. While one file
// fills, what the other holds is brought to where it stays, and the file is
// retired; so a journal never grows and its blocks are written over in place,
// which costs the disk one flush and no change of metadata.
//
// A record is a header of 32 bytes and its content, filled up to a multiple of 32, so
// that no header lies across two sectors: it is on the disk whole or not at all.
//
//	0 magic │ 4 checksum of 8..32, seeded with the journal's id │ 8 sequence │ 16 length │ 20 checksum of content │ 24 kind │ 28 0
//
// Sequence numbers rise by one from record to record, through both files and for ever.
type journal struct {
	files  [2]*os.File
	id     uint32 // records of another id are none
	limit  int64  // a file this full takes no more
	sync   bool
	active int
	end    int64  // of the active file
	last   uint64 // sequence
	buf    []byte // reused
}

const (
	journalMagic = 0x6b6a6e6c
	recordHeader = 32
	// journalBytes is how full a file gets. What both hold is also in memory,
	// and read back after a crash.
	journalBytes = 4 << 20
)

// Kinds of records.
const (
	recordEntries uint32 = 1 // entries are stored
	recordDelete  uint32 = 2 // a range is deleted
	recordRetired uint32 = 3 // the file holds nothing that counts; the number is that of its last record
)

// change is a record as read back: entries, or a range that was deleted.
type change struct {
	entries     []*raft.Log
	first, last uint64
}

// openJournal opens or makes the two files, path.0 and path.1, and returns
// what they hold, oldest first. A record that a crash cut short was never
// acknowledged and is dropped; damage anywhere else is an ErrCorruptLog.
func openJournal(path string, id uint32, limit int64, sync bool) (*journal, []change, error) {
	j := &journal{id: id, limit: limit, sync: sync}
	var held [2]chain
	for i := range j.files {
		name := fmt.Sprintf("%s.%d", path, i)
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			j.Close()
			return nil, nil, fmt.Errorf("journal: %w", err)
		}
		j.files[i] = f
		content, err := io.ReadAll(f)
		if err == nil {
			held[i], err = readChain(content, id)
		}
		if err == nil && int64(len(content)) < limit {
			err = j.fill(f, int64(len(content)))
		}
		if err != nil {
			j.Close()
			return nil, nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	if err := syncFolder(filepath.Dir(path)); err != nil {
		j.Close()
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	changes, err := j.resume(held)
	if err != nil {
		j.Close()
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return j, changes, nil
}

// fill makes a new file as long as it gets, so that appending need not allocate.
func (j *journal) fill(f *os.File, from int64) error {
	if !j.sync {
		return f.Truncate(j.limit)
	}
	if _, err := f.WriteAt(make([]byte, j.limit-from), from); err != nil {
		return err
	}
	return f.Sync()
}

// syncFolder makes it durable which files are in a folder.
func syncFolder(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// resume finds where to go on.
func (j *journal) resume(held [2]chain) ([]change, error) {
	older, newer := 0, 1
	if held[0].first > held[1].first {
		older, newer = 1, 0
	}
	o, n := held[older], held[newer]
	switch {
	case n.first == 0: // both are empty
		j.last = max(o.last, n.last)
		return nil, nil
	case o.first == 0: // the other is retired or new
	case o.torn || o.last+1 != n.first:
		return nil, fmt.Errorf("records %d to %d are followed by %d: %w", o.first, o.last, n.first, ErrCorruptLog)
	}
	j.active, j.end, j.last = newer, n.end, n.last
	return append(o.changes, n.changes...), nil
}

// chain is what one file holds.
type chain struct {
	first, last uint64 // first is 0 when it holds nothing; last tells then what it held once
	end         int64
	torn        bool // the record after the last is there in part
	changes     []change
}

func readChain(b []byte, id uint32) (chain, error) {
	var c chain
	if h, ok := parseHeader(b, 0, id); ok && h.kind == recordRetired {
		return chain{last: h.sequence}, nil
	} else if ok {
		c.first, c.last = h.sequence, h.sequence-1
	} else if len(b) >= recordHeader && [recordHeader]byte(b) != [recordHeader]byte{} && isOf(b, id) {
		return c, fmt.Errorf("the first record is damaged: %w", ErrCorruptLog)
	} else {
		return c, nil
	}
	for {
		h, ok := parseHeader(b, c.end, id)
		if !ok || h.sequence != c.last+1 {
			break
		}
		content := b[c.end+recordHeader:]
		if int64(len(content)) < h.length || crc32.Checksum(content[:h.length], castagnoli) != h.sum {
			c.torn = true
			break
		}
		ch, err := parseContent(h.kind, content[:h.length])
		if err != nil {
			return c, fmt.Errorf("record %d: %w: %w", h.sequence, ErrCorruptLog, err)
		}
		c.last = h.sequence
		c.changes = append(c.changes, ch)
		c.end += padded(h.length)
	}
	// Nothing is written before all before it is on the disk: a later record
	// says that this one could be read once.
	for at := c.end + recordHeader; at+recordHeader <= int64(len(b)); at += recordHeader {
		if h, ok := parseHeader(b, at, id); ok && h.sequence > c.last+1 {
			return c, fmt.Errorf("record %d is there, %d is not: %w", h.sequence, c.last+1, ErrCorruptLog)
		}
	}
	return c, nil
}

// isOf says that something in the file was written under this id.
func isOf(b []byte, id uint32) bool {
	for at := int64(0); at+recordHeader <= int64(len(b)); at += recordHeader {
		if _, ok := parseHeader(b, at, id); ok {
			return true
		}
	}
	return false
}

type header struct {
	sequence uint64
	length   int64
	sum      uint32
	kind     uint32
}

func parseHeader(b []byte, at int64, id uint32) (header, bool) {
	if at+recordHeader > int64(len(b)) {
		return header{}, false
	}
	b = b[at : at+recordHeader]
	if binary.LittleEndian.Uint32(b) != journalMagic || binary.LittleEndian.Uint32(b[4:]) != crc32.Update(id, castagnoli, b[8:]) {
		return header{}, false
	}
	return header{
		sequence: binary.LittleEndian.Uint64(b[8:]), length: int64(binary.LittleEndian.Uint32(b[16:])),
		sum: binary.LittleEndian.Uint32(b[20:]), kind: binary.LittleEndian.Uint32(b[24:]),
	}, true
}

// padded is the room that a record with so much content takes.
func padded(content int64) int64 {
	return (recordHeader + content + recordHeader - 1) / recordHeader * recordHeader
}

// full says that the next record belongs into the other file.
func (j *journal) full() bool { return j.end >= j.limit }

// turn goes on in the other file, which must be retired or new. It returns the
// number of the last record in this one.
func (j *journal) turn() (through uint64) {
	j.active, j.end = 1-j.active, 0
	return j.last
}

// retire empties the file that is not active, which ends with record through:
// what it held is kept elsewhere. It may run beside appending.
func (j *journal) retire(through uint64) error {
	f := j.files[1-j.active]
	mark := make([]byte, recordHeader)
	j.seal(mark, recordRetired, through)
	if _, err := f.WriteAt(mark, 0); err != nil {
		return err
	}
	if info, err := f.Stat(); err == nil && info.Size() > 2*j.limit { // after a record of many megabytes
		if err := f.Truncate(j.limit); err != nil {
			return err
		}
	}
	return j.flush(f)
}

// appendEntries makes entries durable.
func (j *journal) appendEntries(logs []*raft.Log) error {
	b := j.begin()
	for _, l := range logs {
		b = binary.LittleEndian.AppendUint64(b, l.Index)
		b = binary.LittleEndian.AppendUint64(b, l.Term)
		b = append(b, byte(l.Type), byte(len(l.Extensions)))
		b = binary.LittleEndian.AppendUint64(b, uint64(stamp(l.AppendedAt)))
		b = binary.LittleEndian.AppendUint32(b, uint32(len(l.Data)))
		b = append(b, l.Extensions...)
		b = append(b, l.Data...)
	}
	return j.finish(recordEntries, b)
}

// appendDelete makes it durable that a range is deleted.
func (j *journal) appendDelete(first, last uint64) error {
	b := binary.LittleEndian.AppendUint64(j.begin(), first)
	return j.finish(recordDelete, binary.LittleEndian.AppendUint64(b, last))
}

func (j *journal) begin() []byte {
	if cap(j.buf) > 2<<20 {
		j.buf = nil // a rare large record does not stay in memory
	}
	return append(j.buf[:0], make([]byte, recordHeader)...)
}

// finish writes the record and waits for the disk.
func (j *journal) finish(kind uint32, b []byte) error {
	j.seal(b, kind, j.last+1)
	room := padded(int64(len(b) - recordHeader))
	var nothing [recordHeader]byte
	b = append(b, nothing[:room-int64(len(b))]...)
	j.buf = b
	f := j.files[j.active]
	if _, err := f.WriteAt(b, j.end); err != nil {
		return err
	}
	if err := j.flush(f); err != nil {
		return err
	}
	j.end += room
	j.last++
	return nil
}

// seal writes the header of the record in b.
func (j *journal) seal(b []byte, kind uint32, sequence uint64) {
	content := b[recordHeader:]
	binary.LittleEndian.PutUint32(b, journalMagic)
	binary.LittleEndian.PutUint64(b[8:], sequence)
	binary.LittleEndian.PutUint32(b[16:], uint32(len(content)))
	binary.LittleEndian.PutUint32(b[20:], crc32.Checksum(content, castagnoli))
	binary.LittleEndian.PutUint32(b[24:], kind)
	binary.LittleEndian.PutUint32(b[4:], crc32.Update(j.id, castagnoli, b[8:recordHeader]))
}

func (j *journal) flush(f *os.File) error {
	if !j.sync {
		return nil
	}
	for {
		if err := syscall.Fdatasync(int(f.Fd())); err != syscall.EINTR {
			return err
		}
	}
}

// Close closes the files.
func (j *journal) Close() error {
	var errs []error
	for _, f := range j.files {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

var errShort = errors.New("content ends too soon")

const entryHeader = 8 + 8 + 1 + 1 + 8 + 4

func parseContent(kind uint32, b []byte) (change, error) {
	switch kind {
	case recordDelete:
		if len(b) != 16 {
			return change{}, errShort
		}
		return change{first: binary.LittleEndian.Uint64(b), last: binary.LittleEndian.Uint64(b[8:])}, nil
	case recordEntries:
	default:
		return change{}, fmt.Errorf("unknown kind %d", kind)
	}
	var ch change
	for len(b) > 0 {
		if len(b) < entryHeader {
			return ch, errShort
		}
		l := &raft.Log{Index: binary.LittleEndian.Uint64(b), Term: binary.LittleEndian.Uint64(b[8:]), Type: raft.LogType(b[16])}
		extensions := int(b[17])
		l.AppendedAt = unstamp(int64(binary.LittleEndian.Uint64(b[18:])))
		data := int(binary.LittleEndian.Uint32(b[26:]))
		if b = b[entryHeader:]; len(b) < extensions+data {
			return ch, errShort
		}
		l.Extensions, l.Data = b[:extensions:extensions], b[extensions:extensions+data:extensions+data]
		b = b[extensions+data:]
		ch.entries = append(ch.entries, l)
	}
	return ch, nil
}

func stamp(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func unstamp(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n)
}
