package disk

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

	"keelson.dev/keelson/raftstore/disk/platter"
)

// walFiles are the files of raft-wal. It implements types.VFS: raft-wal knows
// segments by name, and each lies in a file of ours (walfile.go) that outlives
// it. The file of a segment that is dropped waits, as it is, for a later one,
// so that a log that is written and shortened for ever writes over blocks that
// are there, and nothing twice.
//
// Which file a segment lies in, and from which number on its sectors count, is
// in the list of segments (walmeta.go): the one write that names a new segment
// gives it its file and makes nothing of all that was in it before. Files that
// the list does not name are of no account, and removed when the log is opened.
type walFiles struct {
	layer  platter.Layer
	dir    string
	id     uint32
	run    uint32        // of this opening of the log
	length int64         // of a file
	next   atomic.Uint64 // number of the next append

	mu      sync.Mutex
	moved   sync.Cond // what is below has changed
	closed  bool
	failed  error // of writing the list: the last word
	tail    types.SegmentWriter
	places  map[string]walPlace // of segments, by their names
	leaving map[string]bool     // segments that are in the list no more: is the file a spare when the last reader is gone?
	spares  []string            // files that wait
	spare   walSpare            // the one that is being made
}

const (
	walSuffix = ".wal"
	// walSlack is room for the append that fills a segment: a part of the segment.
	walSlack = 16
	// walSpares is how many files may wait, at most, and no more than twice as
	// many as were dropped the last time: the log grows by about that until the next.
	walSpares = 16
)

// walFileLength is how long the file of a segment is.
func walFileLength(limit int64) int64 { return (sectorsFor(limit+limit/walSlack) + 1) * sectorBytes }

func newWALFiles(layer platter.Layer, dir string, id uint32) *walFiles {
	v := &walFiles{
		layer: layer, dir: dir, id: id, run: rand.Uint32() | 1,
		places: make(map[string]walPlace), leaving: make(map[string]bool),
	}
	v.moved.L = &v.mu
	v.next.Store(1)
	return v
}

// restore takes over the list of segments and removes what it does not name.
func (v *walFiles) restore(l walList) error {
	v.mu.Lock()
	v.places, v.spares = l.Places, l.Spares
	known := v.known()
	v.mu.Unlock()
	v.next.Store(l.Next)
	list, err := os.ReadDir(v.dir)
	if err != nil {
		return err
	}
	known[walMetaName] = struct{}{}
	for _, e := range list {
		if _, ok := known[e.Name()]; ok {
			continue
		}
		if err := os.RemoveAll(filepath.Join(v.dir, e.Name())); err != nil {
			return fmt.Errorf("sweeping: %w", err)
		}
	}
	return nil
}

// known are all files; v.mu is held.
func (v *walFiles) known() map[string]struct{} {
	out := map[string]struct{}{v.spare.file: {}}
	for _, p := range v.places {
		out[p.File] = struct{}{}
	}
	for _, name := range v.spares {
		out[name] = struct{}{}
	}
	return out
}

// setTail notes the segment that is appended to.
func (v *walFiles) setTail(w types.SegmentWriter) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.tail = w
	v.moved.Broadcast()
}

// awaitTail waits until the segment that is appended to is open. Nobody may
// append meanwhile.
func (v *walFiles) awaitTail() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	for v.failed == nil && v.tail != nil {
		if full, _, err := v.tail.Sealed(); err != nil || !full {
			return err
		}
		v.moved.Wait()
	}
	return v.failed
}

func (v *walFiles) note(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.failed = err
	v.moved.Broadcast()
}

func (v *walFiles) noted() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.failed
}

// prepare gives a new segment a file, unless it has one.
func (v *walFiles) prepare(name string, length int64) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	for {
		if _, there := v.places[name]; there {
			return nil
		}
		if err := v.awaitSpare(length); err != nil {
			return fmt.Errorf("making a file for segment %s of %s: %w", name, v.dir, err)
		}
		file := v.spares[len(v.spares)-1]
		v.spares = v.spares[:len(v.spares)-1]
		v.places[name] = walPlace{File: file, From: v.next.Load(), blank: true}
		v.spare.written, v.spare.failed = 0, false
		if v.usable(file, length) {
			return nil
		}
		delete(v.places, name)
		if err := v.remove(file); err != nil {
			return err
		}
	}
}

// remove removes a file that is of no account. It may be gone: one that is
// longer than it should be does not wait, though the list says so.
func (v *walFiles) remove(file string) error {
	if err := os.Remove(filepath.Join(v.dir, file)); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// fits says that a file is long enough for a segment, and no longer than it may
// stay: one large append makes the file that it ends longer.
func fits(size, length int64) bool { return size >= length && size <= length+length/2 }

// usable says that a file that waited is what the log is to have now. It was
// listed, so what cannot be read of it now may have been read when it was: a
// file that is not as it should be is left out, and costs nothing but the room.
func (v *walFiles) usable(file string, length int64) bool {
	f, err := v.layer.Open(filepath.Join(v.dir, file), os.O_RDWR)
	if err != nil {
		return false
	}
	defer f.Close()
	size, err := f.Size()
	if err != nil || !fits(size, length) {
		return false
	}
	head := make([]byte, sectorBytes)
	if _, err := f.ReadAt(head, 0); err != nil {
		return false
	}
	said, err := readWALHeader(head, v.seed(file))
	return err == nil && said == size
}

// list is what the file of the list is to say; what is to be dropped when it does.
func (v *walFiles) list(s types.PersistentState) (walList, walDrop) {
	v.mu.Lock()
	defer v.mu.Unlock()
	l := walList{PersistentState: s, Places: make(map[string]walPlace, len(s.Segments)), Next: v.next.Load()}
	for _, info := range s.Segments {
		name := segment.FileName(info)
		l.Places[name] = v.places[name]
	}
	d := walDrop{segments: make(map[string]bool)}
	var files []string
	for name, p := range v.places {
		_, stays := l.Places[name]
		if _, left := v.leaving[name]; !stays && !left {
			d.segments[name] = len(files) < walSpares
			if d.segments[name] {
				files = append(files, p.File)
			}
		}
	}
	if room := 2 * len(files); room > 0 {
		room = min(room, walSpares) - len(files)
		if over := len(v.spares) - max(0, room); over > 0 {
			d.spares = slices.Clone(v.spares[:over])
			v.spares = slices.Delete(v.spares, 0, over)
		}
	}
	for name, keep := range v.leaving {
		if keep {
			files = append(files, v.places[name].File)
		}
	}
	l.Spares = append(files, v.spares...)
	return l, d
}

// walDrop is what a new list leaves out.
type walDrop struct {
	segments map[string]bool // is the file to be a spare?
	spares   []string        // there are too many
}

// drop drops what the list that was written leaves out.
func (v *walFiles) drop(d walDrop) error {
	v.mu.Lock()
	for name, keep := range d.segments {
		v.leaving[name] = keep
	}
	v.mu.Unlock()
	for _, file := range d.spares {
		if err := v.remove(file); err != nil {
			return err
		}
	}
	return nil
}

// ListDir implements types.VFS: segments, by name.
func (v *walFiles) ListDir(string) ([]string, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	names := make([]string, 0, len(v.places))
	for name := range v.places {
		names = append(names, name)
	}
	slices.Sort(names)
	return names, nil
}

// Create implements types.VFS: the list names the segment already, and so it has a file.
func (v *walFiles) Create(_, name string, _ uint64) (types.WritableFile, error) {
	return v.open(name, os.O_RDWR)
}

// OpenWriter implements types.VFS.
func (v *walFiles) OpenWriter(_, name string) (types.WritableFile, error) {
	return v.open(name, os.O_RDWR)
}

// OpenReader implements types.VFS.
func (v *walFiles) OpenReader(_, name string) (types.ReadableFile, error) {
	return v.open(name, os.O_RDONLY)
}

// Delete implements types.VFS. Nobody reads the segment any more, and the list
// does not name it: should its file come back after a crash it is swept.
func (v *walFiles) Delete(_, name string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	p, there := v.places[name]
	if !there {
		return fmt.Errorf("segment %s: %w", name, os.ErrNotExist)
	}
	keep := v.leaving[name]
	delete(v.places, name)
	delete(v.leaving, name)
	path := filepath.Join(v.dir, p.File)
	if keep {
		if info, err := os.Stat(path); err == nil && fits(info.Size(), v.length) {
			v.spares = append(v.spares, p.File)
			return nil
		}
	}
	return os.Remove(path)
}

// seed binds sectors to their file.
func (v *walFiles) seed(file string) uint32 {
	return crc32.Update(v.id, castagnoli, []byte(file))
}

// open opens the file of a segment.
func (v *walFiles) open(name string, flag int) (*walFile, error) {
	v.mu.Lock()
	place, there := v.places[name]
	blank := place.blank
	if there {
		place.blank = false
		v.places[name] = place
	}
	v.mu.Unlock()
	if !there {
		return nil, fmt.Errorf("%s: segment %s has no file: %w", v.dir, name, ErrCorruptLog)
	}
	path := filepath.Join(v.dir, place.File)
	f, err := v.layer.Open(path, flag)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%s: the file is missing: %w", path, ErrCorruptLog) // and not ErrNotExist: raft-wal would make another
	}
	if err != nil {
		return nil, err
	}
	w := &walFile{files: v, f: f, name: path, seed: v.seed(place.File), from: place.From}
	if blank {
		w.size, err = f.Size()
	} else {
		err = w.scan()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), f.Close())
	}
	// What was appended after the list was written: nothing runs beside this.
	v.next.Store(max(v.next.Load(), w.newest+1))
	return w, nil
}

// Close waits for the spare file.
func (v *walFiles) Close() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.closed = true
	v.moved.Broadcast()
	for v.spare.file != "" {
		v.moved.Wait()
	}
	return nil
}
