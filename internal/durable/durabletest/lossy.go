// Package durabletest contains file systems for tests of code that writes files durably. Both
// implement durable.FS.
package durabletest

import (
	"bytes"
	"errors"
	"sync"
	"sync/atomic"

	"keelson.dev/keelson/internal/durable"
)

// ErrPowerCut is the error of every sync that fails because of FailSyncs.
var ErrPowerCut = errors.New("power cut")

// lossySector is the size of a sector in bytes. A crash either loses or keeps a whole sector.
const lossySector = 512

// Lossy is a file system over real files. It records which sectors were written since the last
// sync. Crash loses any of these sectors, as a power failure may. Writes and syncs fail as
// requested with Fail and FailSyncs. It is safe for concurrent use, except Crash.
type Lossy struct {
	mu    sync.Mutex
	files []*lossyFile
	fault func(op, name string) error // set by Fail
}

type lossyFile struct {
	durable.File
	fs    *Lossy
	name  string
	saved []byte // the content that is on the disk
	dirty map[int64]struct{}
}

// Open implements durable.FS.
func (l *Lossy) Open(name string, flag int) (durable.File, error) {
	f, err := (durable.OS{NoSync: true}).Open(name, flag)
	if err != nil {
		return nil, err
	}
	content, err := durable.ReadAll(f)
	if err != nil {
		return nil, err
	}
	out := &lossyFile{File: f, fs: l, name: name, saved: content, dirty: make(map[int64]struct{})}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.files = append(l.files, out)
	return out, nil
}

// injectedError returns the error that the function passed to Fail returns for the operation op
// ("write" or "sync") on the file with the given name. It returns nil if no such function is set.
func (l *Lossy) injectedError(op, name string) error {
	l.mu.Lock()
	fault := l.fault
	l.mu.Unlock()
	if fault == nil {
		return nil
	}
	return fault(op, name)
}

// FailSyncs lets the first successes syncs succeed. All later syncs fail with ErrPowerCut. It
// replaces the function passed to Fail.
func (l *Lossy) FailSyncs(successes int64) {
	var n atomic.Int64
	l.Fail(func(op, _ string) error {
		if op == "sync" && n.Add(1) > successes {
			return ErrPowerCut
		}
		return nil
	})
}

// Fail sets a function that is called before each operation op ("write" or "sync") on a file. If it
// returns an error, the operation fails with that error. The function is called concurrently and
// may block. If fault is nil, all operations succeed.
func (l *Lossy) Fail(fault func(op, name string) error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fault = fault
}

// WriteAt implements io.WriterAt. Even a write that fails may have changed the file.
func (f *lossyFile) WriteAt(p []byte, off int64) (int, error) {
	fault := f.fs.injectedError("write", f.name)
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	n, err := f.File.WriteAt(p, off)
	for at := off / lossySector; at*lossySector < off+int64(n); at++ {
		f.dirty[at] = struct{}{}
	}
	if fault != nil {
		return 0, fault
	}
	return n, err
}

// Sync makes all unsynced sectors durable, or fails and makes none durable.
func (f *lossyFile) Sync() error {
	if err := f.fs.injectedError("sync", f.name); err != nil {
		return err
	}
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	size, err := f.Size()
	if err != nil {
		return err
	}
	if grown := size - int64(len(f.saved)); grown > 0 {
		f.saved = append(f.saved, make([]byte, grown)...)
	}
	f.saved = f.saved[:size]
	for at := range f.dirty {
		from := at * lossySector
		if from >= size {
			continue
		}
		if _, err := f.ReadAt(f.saved[from:min(from+lossySector, size)], from); err != nil {
			return err
		}
	}
	clear(f.dirty)
	return nil
}

// Close leaves the real file open, because Crash writes to it.
func (f *lossyFile) Close() error { return nil }

// Crash loses each unsynced sector for which the function lose returns true, and closes all files.
// lost reports whether any file has changed. The files must not be used afterwards; new files can
// be opened.
func (l *Lossy) Crash(lose func() bool) (lost bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range l.files {
		var content []byte
		if size, e := f.Size(); e == nil {
			content = make([]byte, size)
			if _, e := f.ReadAt(content, 0); e != nil && len(content) > 0 {
				err = errors.Join(err, e)
			}
		}
		for at := range f.dirty {
			from := at * lossySector
			to := min(from+lossySector, int64(len(content)))
			old := make([]byte, max(0, to-from))
			if from < int64(len(f.saved)) {
				copy(old, f.saved[from:])
			}
			if from < to && !bytes.Equal(old, content[from:to]) && lose() {
				lost = true
				_, e := f.File.WriteAt(old, from)
				err = errors.Join(err, e)
			}
		}
		err = errors.Join(err, f.File.Close())
	}
	l.files = nil
	return lost, err
}
