package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore/disk/platter"
)

// journal is two files written in turn, each from its beginning, one record
// after the other. A record is durable when append returns. While one file
// fills, what the other holds is brought to where it stays, and the file is
// retired; so a journal never grows and its blocks are written over in place,
// which costs the disk one flush and no change of metadata.
//
// A record fills whole sectors (sector.go), numbered sequence<<20 and up. Its
// content begins with
//
//	0 kind │ 4 length of what follows │ 8 last index of the log before it
//
// Sequences rise by one from record to record, through both files and for
// ever. So after a crash there are, beyond the last whole record, only pieces
// of the one that came next, and what is older.
type journal struct {
	files  [2]platter.File
	names  [2]string
	id     uint32 // sectors of another id are none
	run    uint32 // of this opening: no piece of an earlier attempt passes for one of ours
	limit  int64
	active int
	end    int64  // of the active file
	last   uint64 // sequence
	top    uint64 // last index of the log after it
	older  *chain // of the other file, as found: not retired yet
	out    sectorWriter
	failed error // of a write: nobody knows what the disk holds
}

const (
	recordHead = 16
	// journalBytes is how long a file is. What both hold is also in memory,
	// and read back after a crash.
	journalBytes = 4 << 20
	// sequenceShift leaves room for the place of a sector in its record.
	sequenceShift = 20
)

// Kinds of records.
const (
	recordEntries uint32 = 1 // entries are stored
	recordDelete  uint32 = 2 // a range is deleted
	recordRetired uint32 = 3 // the file holds nothing that counts; the sequence is that of its last record
	recordTop     uint32 = 4 // an entry was stored past the journal
)

// change is a record as read back: entries, or a range that was deleted.
type change struct {
	sequence    uint64
	before      uint64
	entries     []*raft.Log
	first, last uint64
	top         uint64 // of recordTop
}

// errJournalFull says that a record does not fit into a file of the journal.
var errJournalFull = errors.New("record is longer than a file of the journal")

// journalNames are the files of a journal.
func journalNames(path string) [2]string { return [2]string{path + ".0", path + ".1"} }

// makeJournal makes the two files of a new journal.
func makeJournal(layer platter.Layer, path string, limit int64) error {
	for _, name := range journalNames(path) {
		f, err := layer.Open(name+platter.NewSuffix, os.O_RDWR|os.O_CREATE|os.O_TRUNC)
		if err != nil {
			return fmt.Errorf("journal: %w", err)
		}
		if err := errors.Join(platter.Fill(f, 0, limit), f.Close()); err != nil {
			return fmt.Errorf("making %s: %w", name, err)
		}
		if err := os.Rename(name+platter.NewSuffix, name); err != nil {
			return fmt.Errorf("journal: %w", err)
		}
	}
	return platter.SyncFolder(filepath.Dir(path))
}

// openJournal opens the two files and returns what they hold, oldest first. A
// record that a crash cut short was never acknowledged and is dropped; any
// damage is an ErrCorruptLog.
func openJournal(layer platter.Layer, path string, id uint32, limit int64) (*journal, []change, error) {
	j := &journal{id: id, limit: limit, run: rand.Uint32() | 1, names: journalNames(path)}
	var held [2]chain
	for i, name := range j.names {
		f, err := layer.Open(name, os.O_RDWR)
		if errors.Is(err, os.ErrNotExist) {
			err = fmt.Errorf("the file is missing: %w", ErrCorruptLog)
		}
		if err == nil {
			j.files[i] = f
			held[i], err = j.read(f)
		}
		if err != nil {
			j.Close()
			return nil, nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	changes, err := j.resume(held)
	if err != nil {
		j.Close()
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return j, changes, nil
}

func (j *journal) read(f platter.File) (chain, error) {
	content, err := platter.ReadAll(f)
	switch {
	case err != nil:
		return chain{}, err
	case int64(len(content)) < j.limit:
		return chain{}, fmt.Errorf("%d bytes where %d were written: %w", len(content), j.limit, ErrCorruptLog)
	}
	return readChain(content[:j.limit], j.id)
}

// resume finds where to go on.
func (j *journal) resume(held [2]chain) ([]change, error) {
	older, newer := 0, 1
	if held[0].last > held[1].last || held[0].last == held[1].last && len(held[0].changes) > 0 {
		older, newer = 1, 0
	}
	o, n := held[older], held[newer]
	j.last, j.top = n.last, n.top
	j.active, j.end = newer, n.end
	switch {
	case len(n.changes) == 0 && len(o.changes) > 0:
		return nil, fmt.Errorf("records %d to %d are followed by the end of %d: %w", o.changes[0].sequence, o.last, n.last, ErrCorruptLog)
	case len(n.changes) == 0:
		// The newer mark stays: it is all that tells where we are.
		j.active, j.end = older, 0
	case o.last != 0 && (o.last+1 != n.changes[0].sequence || o.top != n.changes[0].before):
		return nil, fmt.Errorf("record %d and entry %d are followed by record %d after entry %d: %w",
			o.last, o.top, n.changes[0].sequence, n.changes[0].before, ErrCorruptLog)
	case len(o.changes) > 0:
		j.older = &o
	}
	if seen := max(o.highest, n.highest); seen > j.last+1 {
		return nil, fmt.Errorf("record %d is there, %d is not: %w", seen, j.last+1, ErrCorruptLog)
	}
	return append(o.changes, n.changes...), nil
}

// begin begins a record.
func (j *journal) begin(kind uint32, length int) {
	j.out.reset()
	var head [recordHead]byte
	binary.LittleEndian.PutUint32(head[:], kind)
	binary.LittleEndian.PutUint32(head[4:], uint32(length))
	binary.LittleEndian.PutUint64(head[8:], j.top)
	j.out.put(head[:])
}

// room is what a record with so much content takes.
func room(content int64) int64 { return sectorsFor(recordHead+content) * sectorBytes }

// fits says that a record with so much content goes into the active file.
func (j *journal) fits(content int64) bool { return j.end+room(content) <= j.limit }

// turn goes on in the other file, which must be retired. It returns the number
// of the last record in this one, and the last index of the log after it.
func (j *journal) turn() (through, top uint64) {
	j.active, j.end = 1-j.active, 0
	return j.last, j.top
}

// retire empties a file that ends with record through: what it held is kept
// elsewhere. It may run beside appending to the other.
func (j *journal) retire(file int, through, top uint64) error {
	var out sectorWriter
	var head [recordHead]byte
	binary.LittleEndian.PutUint32(head[:], recordRetired)
	binary.LittleEndian.PutUint64(head[8:], top)
	out.put(head[:])
	f := j.files[file]
	_, err := f.WriteAt(out.finish(j.id, 0, sectorStamp{j.run, through << sequenceShift}), 0)
	if err == nil {
		err = f.Sync()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", j.names[file], err)
	}
	return nil
}

// empty retires both files, the older first: all they held is kept elsewhere.
// No retirement may be under way.
func (j *journal) empty() error {
	j.last = max(j.last, 1) // 0 is the mark of a file never written
	if j.older != nil {
		if err := j.retire(1-j.active, j.older.last, j.older.top); err != nil {
			return err
		}
		j.older = nil
	}
	if err := j.retire(j.active, j.last, j.top); err != nil {
		return err
	}
	j.turn()
	return nil
}

// entriesBytes is the content of a record of entries.
func entriesBytes(logs []*raft.Log) int64 {
	n := int64(0)
	for _, l := range logs {
		n += entryHead + int64(len(l.Extensions)) + int64(len(l.Data))
	}
	return n
}

// appendEntries makes entries durable.
func (j *journal) appendEntries(logs []*raft.Log) error {
	j.begin(recordEntries, int(entriesBytes(logs)))
	var head [entryHead]byte
	for _, l := range logs {
		binary.LittleEndian.PutUint64(head[:], l.Index)
		binary.LittleEndian.PutUint64(head[8:], l.Term)
		head[16], head[17] = byte(l.Type), byte(len(l.Extensions))
		binary.LittleEndian.PutUint64(head[18:], uint64(stamp(l.AppendedAt)))
		binary.LittleEndian.PutUint32(head[26:], uint32(len(l.Data)))
		j.out.put(head[:])
		j.out.put(l.Extensions)
		j.out.put(l.Data)
	}
	return j.finish(logs[len(logs)-1].Index)
}

// appendDelete makes it durable that a range is deleted, after which the log
// ends with top.
func (j *journal) appendDelete(first, last, top uint64) error {
	j.begin(recordDelete, 16)
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:], first)
	binary.LittleEndian.PutUint64(b[8:], last)
	j.out.put(b[:])
	return j.finish(top)
}

// appendTop makes it durable that the log ends with an entry that the journal
// does not hold.
func (j *journal) appendTop(top uint64) error {
	j.begin(recordTop, 8)
	j.out.put(binary.LittleEndian.AppendUint64(nil, top))
	return j.finish(top)
}

// finish writes the record and waits for the disk.
func (j *journal) finish(top uint64) error {
	if j.failed != nil {
		return j.failed
	}
	b := j.out.finish(j.id, j.end, sectorStamp{j.run, (j.last + 1) << sequenceShift})
	f := j.files[j.active]
	if j.end+int64(len(b)) > j.limit {
		return errJournalFull
	}
	_, err := f.WriteAt(b, j.end)
	if err == nil {
		err = f.Sync()
	}
	if err != nil {
		j.failed = fmt.Errorf("%s: %w", j.names[j.active], err)
		return j.failed
	}
	j.end += int64(len(b))
	j.last++
	j.top = top
	return nil
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

const entryHead = 8 + 8 + 1 + 1 + 8 + 4

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
