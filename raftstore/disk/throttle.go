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

// pacedSnapshots is a raft.SnapshotStore that syncs snapshots while they are written, so that they
// do not delay commits. A large snapshot that is written at full speed leaves hundreds of megabytes
// in the page cache. The next sync of any file on the same disk, even of one record, then waits
// until all of them are written: more than half a second per gigabyte.
//
// Each chunk is therefore synced before the next chunk is written. A sync of the journal waits for
// at most two chunks. A replica that writes its own state while it serves requests also pauses
// between chunks (see throttledWriter). A replica that receives the leader's snapshot does not
// pause, because it must catch up.
type pacedSnapshots struct {
	raft.SnapshotStore
	dir string // the directory in which the snapshot store creates its files
}

const (
	// chunkBytes is the size in bytes of a chunk, the part of a snapshot after which the writer
	// syncs or pauses.
	chunkBytes = 1 << 20
	// flushBytes is the interval, in bytes, at which the file's metadata is synced as well: its
	// blocks and its length. If the metadata were synced only at the end, the commits of all
	// replicas on this disk would wait for 40 to 60 ms.
	flushBytes = 16 << 20
	// truncateBytes is the number of bytes by which one step of truncateGradually shortens a file.
	// It is larger for a file that would need more than maxTruncations steps.
	truncateBytes  = 8 << 20
	maxTruncations = 128 // maximum number of steps in which one file is shortened
	// maxPause is the longest pause after a chunk. The pause is twice as long as the chunk took, so
	// that most of the disk's and the processor's time is available to other work.
	maxPause = 20 * time.Millisecond
)

func newPacedSnapshots(s raft.SnapshotStore, folder string) raft.SnapshotStore {
	return &pacedSnapshots{SnapshotStore: s, dir: folder}
}

// Create implements raft.SnapshotStore.
func (p *pacedSnapshots) Create(version raft.SnapshotVersion, index, term uint64, configuration raft.Configuration,
	configurationIndex uint64, trans raft.Transport) (raft.SnapshotSink, error) {
	sink, err := p.SnapshotStore.Create(version, index, term, configuration, configurationIndex, trans)
	if err != nil {
		return nil, err
	}
	s := &pacedSink{SnapshotSink: sink}
	// The sink does not expose its file, so the file is opened a second time.
	for _, name := range []string{sink.ID() + ".tmp/state.bin", sink.ID() + ".snap.new"} {
		if f, err := os.Open(filepath.Join(p.dir, name)); err == nil {
			s.file = f
			break
		}
	}
	return s, nil
}

// pacedSink writes one snapshot in chunks, and syncs each chunk (see flushChunk).
type pacedSink struct {
	raft.SnapshotSink
	file    *os.File // the snapshot's file; nil if not found
	written int64
	paced   int64 // value of written at the end of the last complete chunk
}

// Write implements io.Writer.
func (s *pacedSink) Write(b []byte) (int, error) {
	return writeInChunks(b, func() int64 { return s.paced + chunkBytes - s.written }, func(part []byte) (int, error) {
		n, err := s.SnapshotSink.Write(part)
		if s.written += int64(n); s.written-s.paced >= chunkBytes {
			s.flushChunk()
		}
		return n, err
	})
}

// writeInChunks writes b by calling write with consecutive parts of it. It calls maxPart before
// each call, which returns the maximum length of the next part in bytes. writeInChunks returns the
// number of written bytes and the first error.
func writeInChunks(b []byte, maxPart func() int64, write func(part []byte) (int, error)) (int, error) {
	total := 0
	for len(b) > 0 {
		part := b[:min(int64(len(b)), maxPart())]
		n, err := write(part)
		total += n
		if err != nil {
			return total, err
		}
		b = b[len(part):]
	}
	return total, nil
}

// flushChunk starts to write the last chunk to the disk, and waits until the chunk before it is
// written. The sink buffers data, so the file may be shorter than s.written. The system calls here
// are hints to the kernel: only the sync at the end of the snapshot gives a guarantee.
func (s *pacedSink) flushChunk() {
	before := s.paced
	s.paced = s.written
	if s.file == nil {
		return
	}
	fd := int(s.file.Fd())
	_ = unix.SyncFileRange(fd, before, 0, unix.SYNC_FILE_RANGE_WRITE) // 0 means to the end of the file
	if before > 0 {
		_ = unix.SyncFileRange(fd, 0, before, unix.SYNC_FILE_RANGE_WAIT_BEFORE)
	}
	if before/flushBytes != s.paced/flushBytes {
		_ = unix.Fdatasync(fd) // after a failure, the sink's sync at the end fails as well
	}
}

// Close implements raft.SnapshotSink.
func (s *pacedSink) Close() error {
	s.closeFile()
	return s.SnapshotSink.Close()
}

// Cancel implements raft.SnapshotSink.
func (s *pacedSink) Cancel() error {
	s.closeFile()
	return s.SnapshotSink.Cancel()
}

func (s *pacedSink) closeFile() {
	if s.file != nil {
		s.file.Close()
		s.file = nil
	}
}

// truncateGradually shortens a file step by step, with pauses. If a step fails, it returns early,
// and the caller's removal of the file releases the rest at once. The steps take a few seconds for
// a file of any size, because a stopping replica waits for them.
func truncateGradually(path string) {
	info, err := os.Stat(path)
	if err != nil {
		return
	}
	cut := max(truncateBytes, info.Size()/maxTruncations)
	for size := info.Size() - cut; size > 0; size -= cut {
		began := time.Now()
		if os.Truncate(path, size) != nil {
			return
		}
		<-time.After(min(maxPause, 2*time.Since(began)))
	}
}

// NewThrottledWriter returns a writer to w that pauses after each chunk of chunkBytes. Write
// returns an error after ctx has ended.
func NewThrottledWriter(ctx context.Context, w io.Writer) io.Writer {
	return &throttledWriter{w: w, ctx: ctx, started: time.Now()}
}

// throttledWriter pauses after each chunk for twice as long as the chunk took. Write returns an
// error after ctx has ended: a stopping replica does not wait for the end of its snapshot.
type throttledWriter struct {
	w       io.Writer
	ctx     context.Context
	started time.Time // start of the current chunk
	written int64     // bytes of the current chunk that are written
}

// Write implements io.Writer.
func (r *throttledWriter) Write(b []byte) (int, error) {
	return writeInChunks(b, func() int64 { return chunkBytes - r.written }, func(part []byte) (int, error) {
		n, err := r.w.Write(part)
		if r.written += int64(n); err == nil && r.written >= chunkBytes {
			r.written = 0
			err = r.pause()
		}
		return n, err
	})
}

func (r *throttledWriter) pause() error {
	t := time.NewTimer(min(maxPause, 2*time.Since(r.started)))
	defer t.Stop()
	select {
	case <-t.C:
	case <-r.ctx.Done():
		return context.Cause(r.ctx)
	}
	r.started = time.Now()
	return nil
}
