// Package journal is a write-ahead journal for a raft log store. [Store] makes an append durable
// with one write and one flush. It moves entries to the inner store later, thousands at a time.
//
// A journal consists of two files that are written alternately. Each file is written from its
// start, record after record. A record is durable when the append returns. While one file fills,
// the entries of the other file are moved to the inner store. The other file is then retired, that
// is, marked as empty. A journal therefore never grows, and its blocks are overwritten in place: an
// append costs one flush and no change of metadata.
//
// A record fills whole sectors (package sector), numbered from sequence<<20 up. Its content starts
// with
//
//	0 kind │ 4 length of what follows │ 8 last index of the log before it
//
// The sequence numbers of records rise by one, across both files, and are never reset. After a
// crash, the sectors behind the last complete record therefore belong to the one record that was
// being written, or to older records.
package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/raftstore/disk/sector"
)

// journal reads and writes the two files of a journal. Its methods must not be called concurrently,
// with one exception: retire may run during appends to the other file.
type journal struct {
	files  [2]durable.File
	names  [2]string
	id     uint32 // random number of the log, which seeds the checksums; a sector of another log counts as damaged
	run    uint32 // random number of this opening of the journal; tells its sectors from those of earlier openings
	limit  int64  // size of a file in bytes
	active int    // index in files of the active file, to which records are appended
	end    int64  // offset of the next record in the active file
	last   uint64 // sequence number of the last record
	top    uint64 // last index of the log after the last record
	older  *chain // content of the other file when it was opened; nil once that file is retired
	out    sector.Buffer
	failed error // error of the first failed write, after which the content of the disk is unknown
}

const (
	recordHead = 16
	// DefaultFileBytes is the default size of a file. The content of both files is also in memory,
	// and is read after a crash.
	DefaultFileBytes = 4 << 20
	// sequenceShift is the number of low bits of a sector's number that hold its position in the
	// record. The higher bits hold the sequence number of the record.
	sequenceShift = 20
	// entryHead is the size of the header of an entry in a record, in bytes.
	entryHead = 8 + 8 + 1 + 1 + 8 + 4
)

// Kinds of records.
const (
	recordEntries uint32 = 1 // entries are stored
	recordDelete  uint32 = 2 // a range is deleted
	recordRetired uint32 = 3 // the file is retired; the sequence number is that of its last record
	recordTop     uint32 = 4 // an entry was stored in the inner store without the journal
)

// errJournalFull is returned for a record that does not fit into a file of the journal, even if the
// file is empty.
var errJournalFull = errors.New("record is longer than a file of the journal")

// Names returns the names of the files of the journal at path.
func Names(path string) [2]string { return [2]string{path + ".0", path + ".1"} }

// Create creates the two files of a new journal, each of limit bytes. The files are durable when it
// returns.
func Create(files durable.FS, path string, limit int64) error {
	for _, name := range Names(path) {
		f, err := files.Open(name+durable.TempSuffix, os.O_RDWR|os.O_CREATE|os.O_TRUNC)
		if err != nil {
			return fmt.Errorf("journal: %w", err)
		}
		if err := errors.Join(durable.Fill(f, 0, limit), f.Close()); err != nil {
			return fmt.Errorf("creating %s: %w", name, err)
		}
		if err := os.Rename(name+durable.TempSuffix, name); err != nil {
			return fmt.Errorf("journal: %w", err)
		}
	}
	return durable.Sync(filepath.Dir(path))
}

// openJournal opens the two files of the journal at path, and returns the changes that they
// contain, oldest first. An incomplete last record was never acknowledged and is dropped. For a
// damaged file the error is sector.ErrCorruptLog. id is the number of the log, and limit is the
// size of a file in bytes.
func openJournal(files durable.FS, path string, id uint32, limit int64) (*journal, []change, error) {
	j := &journal{id: id, limit: limit, run: rand.Uint32() | 1, names: Names(path)}
	var held [2]chain
	for i, name := range j.names {
		f, err := files.Open(name, os.O_RDWR)
		if errors.Is(err, os.ErrNotExist) {
			err = fmt.Errorf("the file is missing: %w", sector.ErrCorruptLog)
		}
		if err == nil {
			j.files[i] = f
			held[i], err = j.readFile(f)
		}
		if err != nil {
			j.Close()
			return nil, nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	changes, err := j.findEnd(held)
	if err != nil {
		j.Close()
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return j, changes, nil
}

func (j *journal) readFile(f durable.File) (chain, error) {
	content, err := durable.ReadAll(f)
	switch {
	case err != nil:
		return chain{}, err
	case int64(len(content)) < j.limit:
		return chain{}, fmt.Errorf("%d bytes where %d were written: %w", len(content), j.limit, sector.ErrCorruptLog)
	}
	return readChain(content[:j.limit], j.id)
}

// findEnd determines where the next record is to be written, and stores this position in j.
// contents are the decoded contents of the two files. findEnd returns the changes of both files,
// oldest first.
func (j *journal) findEnd(contents [2]chain) ([]change, error) {
	older, newer := 0, 1
	if contents[0].last > contents[1].last || contents[0].last == contents[1].last && len(contents[0].changes) > 0 {
		older, newer = 1, 0
	}
	o, n := contents[older], contents[newer]
	j.last, j.top = n.last, n.top
	j.active, j.end = newer, n.end
	switch {
	case len(n.changes) == 0 && len(o.changes) > 0:
		return nil, fmt.Errorf("records %d to %d are followed by the end of %d: %w",
			o.changes[0].sequence, o.last, n.last, sector.ErrCorruptLog)
	case len(n.changes) == 0:
		// Both files are retired. The mark in the newer file is kept, because only it contains the
		// sequence of the last record. The next record is written to the older file.
		j.active, j.end = older, 0
	case o.last != 0 && (o.last+1 != n.changes[0].sequence || o.top != n.changes[0].before):
		return nil, fmt.Errorf("record %d and entry %d are followed by record %d after entry %d: %w",
			o.last, o.top, n.changes[0].sequence, n.changes[0].before, sector.ErrCorruptLog)
	case len(o.changes) > 0:
		j.older = &o
	}
	if seen := max(o.highest, n.highest); seen > j.last+1 {
		return nil, fmt.Errorf("record %d exists, record %d does not: %w", seen, j.last+1, sector.ErrCorruptLog)
	}
	return append(o.changes, n.changes...), nil
}

// startRecord clears the buffer and starts a record of the given kind in it. length is the size of
// the record's content in bytes.
func (j *journal) startRecord(kind uint32, length int) {
	j.out.Reset()
	var head [recordHead]byte
	binary.LittleEndian.PutUint32(head[:], kind)
	binary.LittleEndian.PutUint32(head[4:], uint32(length))
	binary.LittleEndian.PutUint64(head[8:], j.top)
	j.out.Append(head[:])
}

// recordBytes returns the size on disk of a record with the given size of its content, both in
// bytes.
func recordBytes(contentSize int64) int64 {
	return sector.CountFor(recordHead+contentSize) * sector.Size
}

// fitsActiveFile reports whether a record with the given size of its content, in bytes, fits into
// the rest of the active file.
func (j *journal) fitsActiveFile(contentSize int64) bool {
	return j.end+recordBytes(contentSize) <= j.limit
}

// switchFiles makes the other file, which must be retired, the active file. Both results describe
// the last record in the previously active file: lastSequence is its sequence number, and lastIndex
// the last index of the log after it.
func (j *journal) switchFiles() (lastSequence, lastIndex uint64) {
	j.active, j.end = 1-j.active, 0
	return j.last, j.top
}

// retire marks a file as empty after the inner store has received the changes of the file.
// lastSequence is the sequence number of the last record in the file, and lastIndex the last index
// of the log after it. retire may run during appends to the other file.
func (j *journal) retire(file int, lastSequence, lastIndex uint64) error {
	var out sector.Buffer
	var head [recordHead]byte
	binary.LittleEndian.PutUint32(head[:], recordRetired)
	binary.LittleEndian.PutUint64(head[8:], lastIndex)
	out.Append(head[:])
	f := j.files[file]
	_, err := f.WriteAt(out.SealNumbered(j.id, 0, sector.Stamp{Run: j.run, Number: lastSequence << sequenceShift}), 0)
	if err == nil {
		err = f.Sync()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", j.names[file], err)
	}
	return nil
}

// retireBoth retires both files, the older one first, after the inner store has received all
// changes. retire must not run concurrently.
func (j *journal) retireBoth() error {
	j.last = max(j.last, 1) // a sequence of 0 means that the file was never written
	if j.older != nil {
		if err := j.retire(1-j.active, j.older.last, j.older.top); err != nil {
			return err
		}
		j.older = nil
	}
	if err := j.retire(j.active, j.last, j.top); err != nil {
		return err
	}
	j.switchFiles()
	return nil
}

// entriesBytes returns the size of the content of a record with the given entries, in bytes.
func entriesBytes(logs []*raft.Log) int64 {
	n := int64(0)
	for _, l := range logs {
		n += entryHead + int64(len(l.Extensions)) + int64(len(l.Data))
	}
	return n
}

// appendEntries appends a record with the given entries, and returns when it is durable.
func (j *journal) appendEntries(logs []*raft.Log) error {
	j.startRecord(recordEntries, int(entriesBytes(logs)))
	var head [entryHead]byte
	for _, l := range logs {
		binary.LittleEndian.PutUint64(head[:], l.Index)
		binary.LittleEndian.PutUint64(head[8:], l.Term)
		head[16], head[17] = byte(l.Type), byte(len(l.Extensions))
		binary.LittleEndian.PutUint64(head[18:], uint64(encodeTime(l.AppendedAt)))
		binary.LittleEndian.PutUint32(head[26:], uint32(len(l.Data)))
		j.out.Append(head[:])
		j.out.Append(l.Extensions)
		j.out.Append(l.Data)
	}
	return j.writeRecord(logs[len(logs)-1].Index)
}

// appendDelete appends a record of the deletion of the entries first to last, and returns when the
// record is durable. lastIndex is the last index of the log after the deletion.
func (j *journal) appendDelete(first, last, lastIndex uint64) error {
	j.startRecord(recordDelete, 16)
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:], first)
	binary.LittleEndian.PutUint64(b[8:], last)
	j.out.Append(b[:])
	return j.writeRecord(lastIndex)
}

// appendTop appends a record which states that the log ends with the entry lastIndex, and that only
// the inner store contains this entry. It returns when the record is durable.
func (j *journal) appendTop(lastIndex uint64) error {
	j.startRecord(recordTop, 8)
	j.out.Append(binary.LittleEndian.AppendUint64(nil, lastIndex))
	return j.writeRecord(lastIndex)
}

// writeRecord writes the record in the buffer and syncs the file. lastIndex is the last index of
// the log after the record. After a failed call all further calls fail.
func (j *journal) writeRecord(lastIndex uint64) error {
	if j.failed != nil {
		return j.failed
	}
	b := j.out.SealNumbered(j.id, j.end, sector.Stamp{Run: j.run, Number: (j.last + 1) << sequenceShift})
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
	j.top = lastIndex
	return nil
}

// Close closes both files.
func (j *journal) Close() error {
	var errs []error
	for _, f := range j.files {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// encodeTime returns t in nanoseconds since 1970. For the zero time it returns 0.
func encodeTime(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func decodeTime(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n)
}
