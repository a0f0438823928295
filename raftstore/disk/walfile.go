package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft-wal/types"

	"keelson.dev/keelson/raftstore/disk/platter"
)

// walFiles are the files of raft-wal, made of sectors (sector.go). A file has
// its whole length, in zeros, before it takes a byte, so that a shorter one is
// a damaged one. It implements types.VFS.
//
// The first sector tells the length. The number of a sector is that of the
// opening of the file that wrote it, from 1. What a later opening has written
// cuts off what earlier ones left behind it: pieces of an append that a crash
// cut short never come back.
type walFiles struct {
	layer platter.Layer
	dir   string
	id    uint32

	mu     sync.Mutex
	spare  chan error // answers when the spare file is ready; nil = none is being made
	closed bool
	failed error // of making a segment
	tail   types.SegmentWriter
	moved  sync.Cond // tail or failed has changed
}

func newWALFiles(layer platter.Layer, dir string, id uint32) *walFiles {
	v := &walFiles{layer: layer, dir: dir, id: id}
	v.moved.L = &v.mu
	return v
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

const (
	walMagic     = "keelwal1"
	walSpareName = "spare"
	// walSlack is room for the append that fills a segment: a part of the segment.
	walSlack = 16
)

// seed binds sectors to their file.
func (v *walFiles) seed(name string) uint32 {
	return crc32.Update(v.id, castagnoli, []byte(name))
}

// prepare makes the file of a segment, unless it is there. The spare one is taken.
func (v *walFiles) prepare(name string, size int64) error {
	path := filepath.Join(v.dir, name)
	if there, err := platter.Exists(path); there || err != nil {
		return err
	}
	length := (sectorsFor(size+size/walSlack) + 1) * sectorBytes
	v.mu.Lock()
	spare := v.spare
	v.spare = nil
	v.mu.Unlock()
	made := false
	if spare != nil {
		made = <-spare == nil
	}
	tmp := filepath.Join(v.dir, walSpareName)
	if !made {
		if err := v.zeros(tmp, length); err != nil {
			return fmt.Errorf("making %s: %w", path, err)
		}
	}
	f, err := v.layer.Open(tmp, os.O_RDWR)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(walHeader(v.seed(name), length), 0)
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("making %s: %w", path, err)
	}
	if err := platter.MoveFile(tmp, path); err != nil {
		return err
	}
	v.makeSpare(length)
	return nil
}

// zeros makes a file full of zeros.
func (v *walFiles) zeros(path string, length int64) error {
	f, err := v.layer.Open(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC)
	if err != nil {
		return err
	}
	return errors.Join(platter.Fill(f, 0, length), f.Close())
}

// makeSpare makes the next file ahead of time, so that appending never waits for it.
func (v *walFiles) makeSpare(length int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed {
		return
	}
	done := make(chan error, 1)
	v.spare = done
	go func() { done <- v.zeros(filepath.Join(v.dir, walSpareName), length) }()
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

// Close waits for the spare file.
func (v *walFiles) Close() error {
	v.mu.Lock()
	v.closed = true
	spare := v.spare
	v.spare = nil
	v.mu.Unlock()
	if spare != nil {
		<-spare
	}
	return nil
}

func walHeader(seed uint32, length int64) []byte {
	var w sectorWriter
	w.put([]byte(walMagic))
	w.put(binary.LittleEndian.AppendUint64(nil, uint64(length)))
	return w.finish(seed, 0, sectorStamp{run: rand.Uint32() | 1})
}

// ListDir implements types.VFS.
func (v *walFiles) ListDir(dir string) ([]string, error) {
	list, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	names := make([]string, len(list))
	for i, e := range list {
		names[i] = e.Name()
	}
	return names, nil
}

// Create implements types.VFS: prepare has made the file.
func (v *walFiles) Create(_, name string, size uint64) (types.WritableFile, error) {
	if err := v.prepare(name, int64(size)); err != nil {
		return nil, err
	}
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

// Delete implements types.VFS.
func (v *walFiles) Delete(dir, name string) error {
	if err := os.Remove(filepath.Join(dir, name)); err != nil {
		return err
	}
	return platter.SyncFolder(dir)
}

// walFile is one segment. raft-wal appends only, from one goroutine, and reads
// what it has appended from many.
type walFile struct {
	f    platter.File
	name string
	seed uint32
	run  uint32
	this uint64 // number of this opening
	size int64  // of the file

	mu   sync.RWMutex
	live int64              // sectors that count
	dead map[int64]struct{} // those among them that a later opening cut off
	tail []byte
	out  []byte
}

func (v *walFiles) open(name string, flag int) (*walFile, error) {
	path := filepath.Join(v.dir, name)
	f, err := v.layer.Open(path, flag)
	if err != nil {
		return nil, err
	}
	w := &walFile{f: f, name: path, seed: v.seed(name), run: rand.Uint32() | 1}
	if err := w.scan(); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), f.Close())
	}
	return w, nil
}

// scan reads every sector of the file.
func (w *walFile) scan() error {
	size, err := w.f.Size()
	if err != nil {
		return err
	}
	b := make([]byte, 256*sectorBytes)
	var length int64
	newest := uint64(1)
	for at := int64(0); at < size; at += int64(len(b)) {
		b = b[:min(int64(len(b)), size-at)]
		if n, err := w.f.ReadAt(b, at); err != nil && n < len(b) {
			return err
		}
		if at == 0 {
			if length, err = readWALHeader(b, w.seed); err != nil {
				return err
			}
			if size < length { // longer: growing was cut short
				return fmt.Errorf("%d bytes where %d were written: %w", size, length, ErrCorruptLog)
			}
		}
		for from := int64(0); from+sectorBytes <= int64(len(b)); from += sectorBytes {
			sector := (at + from) / sectorBytes
			if sector == 0 {
				continue
			}
			s, kind := readSector(b[from:], w.seed, at+from)
			switch {
			case kind == sectorBad:
				return fmt.Errorf("sector at %d is damaged: %w", at+from, ErrCorruptLog)
			case kind == sectorGood && s.number >= newest:
				newest, w.live = s.number, sector
			case kind == sectorGood:
				if w.dead == nil {
					w.dead = make(map[int64]struct{})
				}
				w.dead[sector] = struct{}{}
			}
		}
	}
	if length == 0 {
		return fmt.Errorf("the file is empty: %w", ErrCorruptLog)
	}
	w.size = size
	w.this = newest + 1
	return nil
}

func readWALHeader(b []byte, seed uint32) (int64, error) {
	if len(b) < sectorBytes {
		return 0, fmt.Errorf("%d bytes: %w", len(b), ErrCorruptLog)
	}
	if _, kind := readSector(b, seed, 0); kind != sectorGood || string(b[sectorHead:sectorHead+8]) != walMagic {
		return 0, fmt.Errorf("the first sector is damaged: %w", ErrCorruptLog)
	}
	return int64(binary.LittleEndian.Uint64(b[sectorHead+8:])), nil
}

// sectorBuffers are for reading; raft-wal reads 64 KiB for every entry.
var sectorBuffers = sync.Pool{New: func() any { return new([]byte) }}

// ReadAt implements io.ReaderAt, over the content of the sectors. scan has
// checked them; what has gone bad since is found by the checksum of the entry.
// The last sector may be written anew meanwhile, with more behind what is read.
func (w *walFile) ReadAt(p []byte, off int64) (int, error) {
	w.mu.RLock()
	live, whole := w.live, len(w.dead) == 0
	w.mu.RUnlock()
	first := 1 + off/sectorRoom
	last := 1 + (off+int64(len(p))-1)/sectorRoom
	done := 0
	if have := min(last, live) - first + 1; have > 0 && len(p) > 0 {
		buffer := sectorBuffers.Get().(*[]byte)
		defer sectorBuffers.Put(buffer)
		if int64(cap(*buffer)) < have*sectorBytes {
			*buffer = make([]byte, have*sectorBytes)
		}
		b := (*buffer)[:have*sectorBytes]
		if n, err := w.f.ReadAt(b, first*sectorBytes); err != nil && n < len(b) {
			return 0, fmt.Errorf("%s: %w", w.name, err)
		}
		skip := off % sectorRoom
		for i := range have {
			from := i * sectorBytes
			content := b[from+sectorHead : from+sectorBytes]
			if !whole && w.isDead(first+i) {
				clear(content)
			}
			done += copy(p[done:], content[skip:])
			skip = 0
		}
	}
	if done < len(p) {
		return done, io.EOF
	}
	return done, nil
}

// WriteAt implements io.WriterAt: it ends the file where p ends.
func (w *walFile) WriteAt(p []byte, off int64) (int, error) {
	first, skip := 1+off/sectorRoom, off%sectorRoom
	w.mu.RLock()
	live := w.live
	w.mu.RUnlock()
	if first > live+1 {
		return 0, fmt.Errorf("%s: writing at %d, beyond the end", w.name, off)
	}
	n := sectorsFor(skip + int64(len(p)))
	if err := w.grow((first + n) * sectorBytes); err != nil {
		return 0, err
	}
	if skip > 0 && int64(len(w.tail)) != skip {
		w.tail = make([]byte, skip)
		if _, err := w.ReadAt(w.tail, off-skip); err != nil {
			return 0, err
		}
	}
	out := sectorWriter{buf: w.out[:0]}
	if skip > 0 {
		out.put(w.tail)
	}
	out.put(p)
	used := (skip + int64(len(p))) % sectorRoom
	stamp := sectorStamp{w.run, w.this}
	clear(out.buf[out.end:])
	for from := int64(0); from < int64(len(out.buf)); from += sectorBytes {
		sealSector(out.buf[from:], w.seed, first*sectorBytes+from, stamp)
	}
	if _, err := w.f.WriteAt(out.buf, first*sectorBytes); err != nil {
		return 0, fmt.Errorf("%s: %w", w.name, err)
	}
	from := int64(len(out.buf)) - sectorBytes + sectorHead
	w.tail = append(w.tail[:0], out.buf[from:from+used]...)
	if w.out = out.buf; cap(w.out) > 2<<20 {
		w.out = nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.live = first + n - 1
	for sector := range w.dead {
		if sector >= first {
			delete(w.dead, sector)
		}
	}
	return len(p), nil
}

func (w *walFile) isDead(sector int64) bool {
	w.mu.RLock()
	defer w.mu.RUnlock()
	_, dead := w.dead[sector]
	return dead
}

// grow makes the file longer, before anything is written there. It happens
// when an append is longer than the slack. It must not ask for the size of the
// file: Linux gives a file whose times were looked at a new time with the next
// write, however soon that is, and ext4 without a journal brings the inode to the
// disk with every fdatasync that finds it changed (50 µs of 150).
func (w *walFile) grow(to int64) error {
	if to <= w.size {
		return nil
	}
	to += 64 << 10
	if err := platter.Fill(w.f, w.size, to); err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	w.size = to
	if _, err := w.f.WriteAt(walHeader(w.seed, to), 0); err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	return w.f.Sync()
}

// Sync implements types.WritableFile.
func (w *walFile) Sync() error {
	if err := w.f.Sync(); err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	return nil
}

// Close implements io.Closer.
func (w *walFile) Close() error { return w.f.Close() }

// quietLogger drops what raft-wal says: what matters comes as an error.
func quietLogger() hclog.Logger { return hclog.NewNullLogger() }
