package wal

import (
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/raftstore/disk/sector"
)

// segmentFiles manages the files in which segments are stored. It implements types.VFS: raft-wal
// opens a segment by the segment's name, and segmentFiles opens the file that stores it.
type segmentFiles struct {
	fs     durable.FS
	dir    string
	id     uint32
	run    uint32        // random number of this opening of the log
	length int64         // length of a new file, in bytes
	next   atomic.Uint64 // number of the next append

	mu       sync.Mutex
	changed  sync.Cond // signaled when a field below has changed
	closed   bool
	failed   error // error of the first failed write of the list, after which no change succeeds
	tail     types.SegmentWriter
	places   map[string]place // files of the segments, by the names of the segments
	dropped  map[string]bool  // segments that left the list but may have readers; true = the file will be a spare
	spares   []string         // spare files: names of files for later segments
	creating spareFile        // the spare file that is being created
}

const (
	// FileSuffix is the suffix of the names of segments and of their files.
	FileSuffix = ".wal"
	// slackDivisor determines the space in a file beyond the limit of its segment: the limit
	// divided by slackDivisor. The append that fills the segment may exceed the limit.
	slackDivisor = 16
	// MaxSpares is the maximum number of spare files. A change of the list that drops segments also
	// leaves at most twice as many spare files as it drops segments. The log usually grows by about
	// as many segments until the next such change.
	MaxSpares = 16
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// fileLength returns the length in bytes of the file for a segment of limit bytes.
func fileLength(limit int64) int64 {
	return (sector.CountFor(limit+limit/slackDivisor) + 1) * sector.Size
}

// FileSeed returns the seed that Seal and CheckStamp of package sector need for a file. id is the
// number of the log, and file is the name of the file.
func FileSeed(id uint32, file string) uint32 { return crc32.Update(id, castagnoli, []byte(file)) }

func newSegmentFiles(fs durable.FS, dir string, id uint32) *segmentFiles {
	v := &segmentFiles{
		fs: fs, dir: dir, id: id, run: rand.Uint32() | 1,
		places: make(map[string]place), dropped: make(map[string]bool),
	}
	v.changed.L = &v.mu
	v.next.Store(1)
	return v
}

// restore sets the segments, their files, and the spare files from the list l. It removes all other
// files from the directory.
func (v *segmentFiles) restore(l List) error {
	v.mu.Lock()
	v.places, v.spares = l.Places, l.Spares
	used := v.usedFiles()
	v.mu.Unlock()
	v.next.Store(l.Next)
	list, err := os.ReadDir(v.dir)
	if err != nil {
		return err
	}
	used[ListName] = struct{}{}
	for _, e := range list {
		if _, ok := used[e.Name()]; ok {
			continue
		}
		if err := os.RemoveAll(filepath.Join(v.dir, e.Name())); err != nil {
			return fmt.Errorf("removing unused files: %w", err)
		}
	}
	return nil
}

// usedFiles returns the names of the files of all segments, of the spare files, and of the file
// that is being created. The caller holds v.mu.
func (v *segmentFiles) usedFiles() map[string]struct{} {
	out := map[string]struct{}{v.creating.name: {}}
	for _, p := range v.places {
		out[p.File] = struct{}{}
	}
	for _, name := range v.spares {
		out[name] = struct{}{}
	}
	return out
}

// setTail sets the writer of the last segment of the log, to which entries are appended.
func (v *segmentFiles) setTail(w types.SegmentWriter) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.tail = w
	v.changed.Broadcast()
}

// awaitTail waits until the last segment of the log is not full. If it is full, another goroutine
// closes it and then sets the next segment with setTail. The caller must prevent appends. awaitTail
// returns an error if a change of the list has failed.
func (v *segmentFiles) awaitTail() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	for v.failed == nil && v.tail != nil {
		if full, _, err := v.tail.Sealed(); err != nil || !full {
			return err
		}
		v.changed.Wait()
	}
	return v.failed
}

// recordFailure stores the error of a failed change of the list of segments. After that no change
// succeeds.
func (v *segmentFiles) recordFailure(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.failed = err
	v.changed.Broadcast()
}

// failure returns the error of the last failed change of the list of segments, or nil if all
// changes have succeeded.
func (v *segmentFiles) failure() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.failed
}

// assignFile assigns a spare file of length bytes to a new segment, and waits until a spare file
// exists. It has no effect if the segment already has a file.
func (v *segmentFiles) assignFile(segmentName string, length int64) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	for {
		if _, ok := v.places[segmentName]; ok {
			return nil
		}
		if err := v.awaitSpare(length); err != nil {
			return fmt.Errorf("creating a file for segment %s of %s: %w", segmentName, v.dir, err)
		}
		name := v.spares[len(v.spares)-1]
		v.spares = v.spares[:len(v.spares)-1]
		v.places[segmentName] = place{File: name, From: v.next.Load(), blank: true}
		v.creating.written, v.creating.failed = 0, false
		if v.isUsable(name, length) {
			return nil
		}
		delete(v.places, segmentName)
		if err := v.removeFile(name); err != nil {
			return err
		}
	}
}

// removeFile removes an unused file. A missing file is not an error: a file that is too long is
// removed although the list names it as a spare file.
func (v *segmentFiles) removeFile(name string) error {
	if err := os.Remove(filepath.Join(v.dir, name)); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// hasUsableLength reports whether a file of size bytes can be reused for a segment that needs
// length bytes. It must have at least length bytes and at most one and a half times as many. A
// large append extends the file that stores it; such a file is not reused.
func hasUsableLength(size, length int64) bool { return size >= length && size <= length+length/2 }

// isUsable reports whether a spare file can store a segment that needs a file of length bytes. An
// unreadable spare file is not usable, but is not an error, because nothing depends on its content.
// Spare files are not read when the log is opened.
func (v *segmentFiles) isUsable(name string, length int64) bool {
	f, err := v.fs.Open(filepath.Join(v.dir, name), os.O_RDWR)
	if err != nil {
		return false
	}
	defer f.Close()
	size, err := f.Size()
	if err != nil || !hasUsableLength(size, length) {
		return false
	}
	head := make([]byte, sector.Size)
	if _, err := f.ReadAt(head, 0); err != nil {
		return false
	}
	stored, err := decodeFileHeader(head, FileSeed(v.id, name))
	return err == nil && stored == size
}

// planList returns the list of segments for a new state of raft-wal. It also returns the segments
// and spare files that must be dropped after the list is written.
func (v *segmentFiles) planList(s types.PersistentState) (List, drop) {
	v.mu.Lock()
	defer v.mu.Unlock()
	l := List{PersistentState: s, Places: make(map[string]place, len(s.Segments)), Next: v.next.Load()}
	for _, info := range s.Segments {
		name := segment.FileName(info)
		l.Places[name] = v.places[name]
	}
	d := drop{segments: make(map[string]bool)}
	var files []string
	for name, p := range v.places {
		_, listed := l.Places[name]
		if _, earlier := v.dropped[name]; !listed && !earlier {
			d.segments[name] = len(files) < MaxSpares
			if d.segments[name] {
				files = append(files, p.File)
			}
		}
	}
	if room := 2 * len(files); room > 0 {
		room = min(room, MaxSpares) - len(files)
		if over := len(v.spares) - max(0, room); over > 0 {
			d.spares = slices.Clone(v.spares[:over])
			v.spares = slices.Delete(v.spares, 0, over)
		}
	}
	for name, kept := range v.dropped {
		if kept {
			files = append(files, v.places[name].File)
		}
	}
	l.Spares = append(files, v.spares...)
	return l, d
}

// drop contains the segments and spare files that a new list of segments no longer contains.
type drop struct {
	segments map[string]bool // dropped segments by name; true = the file will be a spare
	spares   []string        // spare files beyond the maximum
}

// applyDrop drops the segments and spare files in d. It must be called after the new list is
// written. It removes the spare files; the file of a segment remains until raft-wal calls Delete.
func (v *segmentFiles) applyDrop(d drop) error {
	v.mu.Lock()
	for name, kept := range d.segments {
		v.dropped[name] = kept
	}
	v.mu.Unlock()
	for _, name := range d.spares {
		if err := v.removeFile(name); err != nil {
			return err
		}
	}
	return nil
}

// ListDir implements types.VFS. It returns the sorted names of the segments, and not of their
// files.
func (v *segmentFiles) ListDir(string) ([]string, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	names := make([]string, 0, len(v.places))
	for name := range v.places {
		names = append(names, name)
	}
	slices.Sort(names)
	return names, nil
}

// Create implements types.VFS. The new segment is in the list already, so it has a file, which
// Create opens.
func (v *segmentFiles) Create(_, name string, _ uint64) (types.WritableFile, error) {
	return v.openFile(name, os.O_RDWR)
}

// OpenWriter implements types.VFS.
func (v *segmentFiles) OpenWriter(_, name string) (types.WritableFile, error) {
	return v.openFile(name, os.O_RDWR)
}

// OpenReader implements types.VFS.
func (v *segmentFiles) OpenReader(_, name string) (types.ReadableFile, error) {
	return v.openFile(name, os.O_RDONLY)
}

// Delete implements types.VFS. raft-wal calls it when a segment is not in the list and has no
// reader. The file becomes a spare file or is removed. If a crash undoes the removal, restore
// removes the file.
func (v *segmentFiles) Delete(_, name string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	p, ok := v.places[name]
	if !ok {
		return fmt.Errorf("segment %s: %w", name, os.ErrNotExist)
	}
	kept := v.dropped[name]
	delete(v.places, name)
	delete(v.dropped, name)
	path := filepath.Join(v.dir, p.File)
	if kept {
		if info, err := os.Stat(path); err == nil && hasUsableLength(info.Size(), v.length) {
			v.spares = append(v.spares, p.File)
			return nil
		}
	}
	return os.Remove(path)
}

// openFile opens the file of a segment with the flags of os.OpenFile. It reads and verifies the
// file, unless it has no content of this segment yet.
func (v *segmentFiles) openFile(segmentName string, flag int) (*file, error) {
	v.mu.Lock()
	p, ok := v.places[segmentName]
	blank := p.blank
	if ok {
		p.blank = false
		v.places[segmentName] = p
	}
	v.mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("%s: segment %s has no file: %w", v.dir, segmentName, sector.ErrCorruptLog)
	}
	path := filepath.Join(v.dir, p.File)
	f, err := v.fs.Open(path, flag)
	if errors.Is(err, os.ErrNotExist) {
		// The error must not be an os.ErrNotExist: raft-wal would create another file.
		return nil, fmt.Errorf("%s: the file is missing: %w", path, sector.ErrCorruptLog)
	}
	if err != nil {
		return nil, err
	}
	w := &file{files: v, f: f, name: path, seed: FileSeed(v.id, p.File), from: p.From}
	if blank {
		w.size, err = f.Size()
	} else {
		err = w.scan()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), f.Close())
	}
	// The next append must have a higher number than the appends since the last write of the list.
	// The log is being opened, so no append runs concurrently.
	v.next.Store(max(v.next.Load(), w.newest+1))
	return w, nil
}

// Close waits until the creation of a spare file, if any, has succeeded or failed.
func (v *segmentFiles) Close() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.closed = true
	v.changed.Broadcast()
	for v.creating.name != "" {
		v.changed.Wait()
	}
	return nil
}
