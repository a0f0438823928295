package platter

import (
	"bytes"
	"errors"
	"sync"
	"sync/atomic"
)

// ErrPowerCut is what a Lossy that was told to fails with.
var ErrPowerCut = errors.New("power cut")

// lossySector is how much is lost, or kept, as a whole, in bytes.
const lossySector = 512

// Lossy is a file layer over real files that knows which sectors were
// written since the last sync, and can lose any of them as a power cut may. It
// can also be made to fail.
type Lossy struct {
	mu    sync.Mutex
	files []*lossyFile
	fault func(op, name string) error // asked before each "write" and "sync", by several at once; it may wait
}

type lossyFile struct {
	*osFile
	layer *Lossy
	name  string
	saved []byte // what is on the disk for sure
	dirty map[int64]struct{}
}

// Open implements Layer.
func (l *Lossy) Open(name string, flag int) (File, error) {
	f, err := (OS{NoSync: true}).Open(name, flag)
	if err != nil {
		return nil, err
	}
	content, err := ReadAll(f)
	if err != nil {
		return nil, err
	}
	out := &lossyFile{osFile: f.(*osFile), layer: l, name: name, saved: content, dirty: make(map[int64]struct{})}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.files = append(l.files, out)
	return out, nil
}

func (l *Lossy) ask(op, name string) error {
	l.mu.Lock()
	fault := l.fault
	l.mu.Unlock()
	if fault == nil {
		return nil
	}
	return fault(op, name)
}

// FailSyncs lets so many syncs happen and none after them.
func (l *Lossy) FailSyncs(after int64) {
	var n atomic.Int64
	l.Fail(func(op, _ string) error {
		if op == "sync" && n.Add(1) > after {
			return ErrPowerCut
		}
		return nil
	})
}

// Fail asks f before each "write" and "sync"; what it returns is their error. It is
// asked by several at once and may wait; nil lets everything succeed again.
func (l *Lossy) Fail(f func(op, name string) error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fault = f
}

// WriteAt marks the sectors it writes. One that fails may have written all the same.
func (f *lossyFile) WriteAt(p []byte, off int64) (int, error) {
	fault := f.layer.ask("write", f.name)
	f.layer.mu.Lock()
	defer f.layer.mu.Unlock()
	n, err := f.osFile.WriteAt(p, off)
	for at := off / lossySector; at*lossySector < off+int64(n); at++ {
		f.dirty[at] = struct{}{}
	}
	if fault != nil {
		return 0, fault
	}
	return n, err
}

// Sync makes everything durable, or nothing.
func (f *lossyFile) Sync() error {
	if err := f.layer.ask("sync", f.name); err != nil {
		return err
	}
	f.layer.mu.Lock()
	defer f.layer.mu.Unlock()
	size, err := f.osFile.Size()
	if err != nil {
		return err
	}
	if grown := size - int64(len(f.saved)); grown > 0 {
		f.saved = append(f.saved, make([]byte, grown)...)
	}
	f.saved = f.saved[:size]
	// What was not written since the last sync is saved already.
	for at := range f.dirty {
		from := at * lossySector
		if from >= size {
			continue
		}
		if _, err := f.osFile.ReadAt(f.saved[from:min(from+lossySector, size)], from); err != nil {
			return err
		}
	}
	clear(f.dirty)
	return nil
}

// Close leaves the real file open, so that crash can write to it.
func (f *lossyFile) Close() error { return nil }

// Crash loses each sector that was not synced, or not, as lose says. It
// reports whether anything was lost. The files must not be used afterwards.
func (l *Lossy) Crash(lose func() bool) (lost bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range l.files {
		var now []byte
		if info, e := f.Stat(); e == nil {
			now = make([]byte, info.Size())
			if _, e := f.osFile.ReadAt(now, 0); e != nil && len(now) > 0 {
				err = errors.Join(err, e)
			}
		}
		for at := range f.dirty {
			from := at * lossySector
			to := min(from+lossySector, int64(len(now)))
			old := make([]byte, max(0, to-from))
			if from < int64(len(f.saved)) {
				copy(old, f.saved[from:])
			}
			if from < to && !bytes.Equal(old, now[from:to]) && lose() {
				lost = true
				_, e := f.osFile.WriteAt(old, from)
				err = errors.Join(err, e)
			}
		}
		err = errors.Join(err, f.osFile.Close())
	}
	l.files = nil
	return lost, err
}
