package disk

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/raft"
	"golang.org/x/sys/unix"
)

// A snapshot must not stand in the way of commits. Written as fast as it goes, a
// large one leaves hundreds of megabytes in the page cache, and whoever flushes a
// file of the same disk next, be it of one record, waits until they are written:
// half a second and more for a gigabyte. pacedSnapshots brings each stretch to
// the disk before it goes on, so that a flush of the journal never waits for
// more than two of them. A replica that writes its own state, and serves
// meanwhile, also rests between stretches (restingWriter); one that takes in the
// leader's does not, because it must catch up.
type pacedSnapshots struct {
	raft.SnapshotStore
	folder string // where a snapshot under way is found, by its id
}

const (
	// paceBytes is one stretch.
	paceBytes = 1 << 20
	// flushBytes is how often what the file system notes of the file, its blocks
	// and its length, is flushed as well. All of it at the end would make the
	// commits of every replica on this disk wait for 40 to 60 ms, one after the other.
	flushBytes = 16 << 20
	// cutBytes is by how much a file that is removed gets shorter at a time.
	cutBytes = 8 << 20
	maxCuts  = 128 // of one file
	// maxRest bounds the pause after a stretch, which else is twice as long as
	// the stretch took: most of the disk and of a processor is left to others.
	maxRest = 20 * time.Millisecond
)

func paceSnapshots(s raft.SnapshotStore, folder string) raft.SnapshotStore {
	return &pacedSnapshots{SnapshotStore: s, folder: folder}
}

// Create implements raft.SnapshotStore.
func (p *pacedSnapshots) Create(version raft.SnapshotVersion, index, term uint64, configuration raft.Configuration,
	configurationIndex uint64, trans raft.Transport) (raft.SnapshotSink, error) {
	sink, err := p.SnapshotStore.Create(version, index, term, configuration, configurationIndex, trans)
	if err != nil {
		return nil, err
	}
	s := &pacedSink{SnapshotSink: sink}
	// The sink does not show its file; it is opened once more.
	for _, name := range []string{sink.ID() + ".tmp/state.bin", sink.ID() + ".snap.new"} {
		if f, err := os.Open(filepath.Join(p.folder, name)); err == nil {
			s.file = f
			break
		}
	}
	return s, nil
}

// pacedSink writes a snapshot stretch by stretch.
type pacedSink struct {
	raft.SnapshotSink
	file    *os.File // the same file once more; nil when not found
	written int64
	paced   int64 // of that, up to the end of the last whole stretch
}

// Write implements io.Writer.
func (s *pacedSink) Write(b []byte) (int, error) {
	return inStretches(b, func() int64 { return s.paced + paceBytes - s.written }, func(part []byte) (int, error) {
		n, err := s.SnapshotSink.Write(part)
		if s.written += int64(n); s.written-s.paced >= paceBytes {
			s.pace()
		}
		return n, err
	})
}

// inStretches writes b in parts no longer than what room says each time.
func inStretches(b []byte, room func() int64, write func(part []byte) (int, error)) (int, error) {
	total := 0
	for len(b) > 0 {
		part := b[:min(int64(len(b)), room())]
		n, err := write(part)
		total += n
		if err != nil {
			return total, err
		}
		b = b[len(part):]
	}
	return total, nil
}

// pace starts the writing of what was handed over last, and waits for what was
// before it. The file may be a little longer or shorter than what was handed
// over: these are hints to the kernel, what counts is the flush at the end.
func (s *pacedSink) pace() {
	before := s.paced
	s.paced = s.written
	if s.file == nil {
		return
	}
	fd := int(s.file.Fd())
	_ = unix.SyncFileRange(fd, before, 0, unix.SYNC_FILE_RANGE_WRITE) // 0: up to the end
	if before > 0 {
		_ = unix.SyncFileRange(fd, 0, before, unix.SYNC_FILE_RANGE_WAIT_BEFORE)
	}
	if before/flushBytes != s.paced/flushBytes {
		_ = unix.Fdatasync(fd) // should it fail, the sink's own flush at the end fails too
	}
}

// Close implements raft.SnapshotSink.
func (s *pacedSink) Close() error {
	s.release()
	return s.SnapshotSink.Close()
}

// Cancel implements raft.SnapshotSink.
func (s *pacedSink) Cancel() error {
	s.release()
	return s.SnapshotSink.Cancel()
}

func (s *pacedSink) release() {
	if s.file != nil {
		s.file.Close()
		s.file = nil
	}
}

// cutSlowly cuts a file shorter and shorter, with rests. Should that fail, its
// removal does all of it at once. It is done within seconds whatever the size,
// since a replica that stops waits for it.
func cutSlowly(path string) {
	info, err := os.Stat(path)
	if err != nil {
		return
	}
	cut := max(cutBytes, info.Size()/maxCuts)
	for size := info.Size() - cut; size > 0; size -= cut {
		began := time.Now()
		if os.Truncate(path, size) != nil {
			return
		}
		<-time.After(min(maxRest, 2*time.Since(began)))
	}
}

// NewResting returns a writer to w that rests.
func NewResting(life context.Context, w io.Writer) io.Writer {
	return &restingWriter{w: w, life: life, began: time.Now()}
}

// restingWriter rests after each stretch for twice as long as it took. It fails when
// life ends: a replica that stops does not wait for the end of its snapshot.
type restingWriter struct {
	w       io.Writer
	life    context.Context
	began   time.Time // of the stretch
	stretch int64     // written of it
}

// Write implements io.Writer.
func (r *restingWriter) Write(b []byte) (int, error) {
	return inStretches(b, func() int64 { return paceBytes - r.stretch }, func(part []byte) (int, error) {
		n, err := r.w.Write(part)
		if r.stretch += int64(n); err == nil && r.stretch >= paceBytes {
			r.stretch = 0
			err = r.rest()
		}
		return n, err
	})
}

func (r *restingWriter) rest() error {
	t := time.NewTimer(min(maxRest, 2*time.Since(r.began)))
	defer t.Stop()
	select {
	case <-t.C:
	case <-r.life.Done():
		return context.Cause(r.life)
	}
	r.began = time.Now()
	return nil
}
