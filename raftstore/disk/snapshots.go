package disk

import (
	"bufio"
	"cmp"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/durable"
)

// ErrCorruptSnapshot is returned for a damaged snapshot file.
var ErrCorruptSnapshot = errors.New("raftstore: snapshot is corrupt")

const (
	snapshotsName  = "snapshots"
	snapshotMagic  = "keelsnap"
	snapshotSuffix = ".snap"
	// snapshotsKept is the number of snapshots that are retained. Only the newest is read; the
	// other snapshot is for manual recovery.
	snapshotsKept = 2
	snapshotSalt  = 32
	snapshotKey   = "keelson snapshot "
)

// snapshotStore is a raft.SnapshotStore with one file for each snapshot. The whole file is verified
// when it is read. It is encrypted if there is a current data key. Readers receive the decrypted
// content, because a peer has other keys.
//
// An unreadable file stops the replica. Otherwise raft would use an older snapshot, although the
// log entries after it no longer exist.
type snapshotStore struct {
	dir    string
	files  durable.FS
	sealer *sealer
	fail   func(error)
	now    func() time.Time

	readers *readerCounts
	opening *sync.RWMutex // held for reading while a file is opened and its data key is looked up
}

// readerCounts counts the open readers of each snapshot.
type readerCounts struct {
	mu     sync.Mutex
	counts map[string]int // number of readers by snapshot ID; an entry that becomes 0 is removed
}

func (r *readerCounts) addReader(id string, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.counts[id] += n; r.counts[id] == 0 {
		delete(r.counts, id)
	}
}

func (r *readerCounts) hasReader(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.counts[id] > 0
}

// snapshotHeader is the JSON header of a snapshot.
type snapshotHeader struct {
	Version            raft.SnapshotVersion
	Index              uint64
	Term               uint64
	Configuration      raft.Configuration
	ConfigurationIndex uint64
	Taken              int64  // time at which the snapshot was taken, in Unix milliseconds
	Key                uint32 `json:",omitempty"` // number of the data key; 0 if not encrypted
	Salt               []byte `json:",omitempty"`
}

func newSnapshotStore(c Config, seals *sealer, fail func(error)) *snapshotStore {
	return &snapshotStore{
		dir: filepath.Join(c.Dir, snapshotsName), files: c.fileSystem(), sealer: seals, fail: fail, now: c.Now,
		readers: &readerCounts{counts: make(map[string]int)}, opening: new(sync.RWMutex),
	}
}

// openSnapshotStore returns the snapshot store of a data directory. It creates the directory of
// snapshots if necessary, and removes incomplete snapshots.
func openSnapshotStore(c Config, seals *sealer, fail func(error)) (*snapshotStore, error) {
	s := newSnapshotStore(c, seals, fail)
	if err := durable.MakeDir(s.dir); err != nil {
		return nil, fmt.Errorf("snapshots: %w", err)
	}
	list, err := os.ReadDir(s.dir)
	for _, e := range list {
		if strings.HasSuffix(e.Name(), durable.TempSuffix) {
			err = errors.Join(err, os.Remove(filepath.Join(s.dir, e.Name())))
		}
	}
	if err != nil {
		return nil, fmt.Errorf("snapshots: %w", err)
	}
	return s, nil
}

// storedSnapshot is a complete snapshot in the directory.
type storedSnapshot struct {
	snapshotHeader
	id   string
	size int64 // size of the content, in bytes
}

// readHeaders returns all complete snapshots, newest first. It reads only the header and the end of
// each file.
func (s *snapshotStore) readHeaders() ([]storedSnapshot, error) {
	files, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("snapshots: %w", err)
	}
	var out []storedSnapshot
	for _, e := range files {
		id, ok := strings.CutSuffix(e.Name(), snapshotSuffix)
		if !ok {
			continue
		}
		k, err := s.readInfo(id)
		if errors.Is(err, os.ErrNotExist) {
			continue // removed concurrently
		}
		if err != nil {
			return nil, err
		}
		out = append(out, k)
	}
	slices.SortFunc(out, func(a, b storedSnapshot) int {
		return -cmp.Or(cmp.Compare(a.Term, b.Term), cmp.Compare(a.Index, b.Index), cmp.Compare(a.Taken, b.Taken))
	})
	return out, nil
}

func (s *snapshotStore) filePath(id string) string { return filepath.Join(s.dir, id+snapshotSuffix) }

// openFile opens a snapshot for reading. Until the result is closed, removeSnapshot does not
// truncate the file.
func (s *snapshotStore) openFile(id string) (durable.File, error) {
	// Before the file is opened: removeSnapshot checks the count after it has renamed the file.
	s.readers.addReader(id, 1)
	f, err := s.files.Open(s.filePath(id), os.O_RDONLY)
	if err != nil {
		s.readers.addReader(id, -1)
		return nil, err
	}
	return &countedFile{File: f, over: sync.OnceFunc(func() { s.readers.addReader(id, -1) })}, nil
}

// countedFile is an open snapshot file. It counts as a reader of the snapshot until it is closed.
type countedFile struct {
	durable.File
	over func()
}

// Close implements io.Closer.
func (f *countedFile) Close() error {
	f.over()
	return f.File.Close()
}

// readInfo returns a snapshot's description from the header and the end of its file.
func (s *snapshotStore) readInfo(id string) (storedSnapshot, error) {
	f, err := s.openFile(id)
	if err != nil {
		return storedSnapshot{}, fmt.Errorf("snapshot: %w", err)
	}
	defer f.Close()
	k, _, err := s.readHead(f, id)
	return k, err
}

func (s *snapshotStore) corruptError(id string, err error) error {
	return fmt.Errorf("%s: %w: %w", s.filePath(id), err, ErrCorruptSnapshot)
}

func (s *snapshotStore) readHead(f durable.File, id string) (storedSnapshot, []byte, error) {
	k := storedSnapshot{id: id}
	length, err := f.Size()
	if err != nil {
		return k, nil, fmt.Errorf("%s: %w", s.filePath(id), err)
	}
	content, all, err := readHeader(io.NewSectionReader(f, 0, length), snapshotMagic)
	if err == nil {
		err = json.Unmarshal(content, &k.snapshotHeader)
	}
	if err != nil {
		return k, nil, s.corruptError(id, err)
	}
	if k.id != snapshotID(k.snapshotHeader) {
		return k, nil, s.corruptError(id, fmt.Errorf("the file contains snapshot %s", snapshotID(k.snapshotHeader)))
	}
	end := make([]byte, footerBytes)
	if n, err := f.ReadAt(end, max(0, length-footerBytes)); n < len(end) {
		return k, nil, s.corruptError(id, truncationError(err))
	}
	if k.size, err = parseFooter(end); err != nil {
		return k, nil, s.corruptError(id, err)
	}
	return k, all, nil
}

func snapshotID(h snapshotHeader) string {
	return fmt.Sprintf("%d-%d-%d", h.Term, h.Index, h.Taken)
}

func (k storedSnapshot) raftMeta() *raft.SnapshotMeta {
	return &raft.SnapshotMeta{
		Version: k.Version, ID: k.id, Index: k.Index, Term: k.Term,
		Configuration: k.Configuration, ConfigurationIndex: k.ConfigurationIndex, Size: k.size,
	}
}

// List implements raft.SnapshotStore.
func (s *snapshotStore) List() ([]*raft.SnapshotMeta, error) {
	list, err := s.readHeaders()
	if err != nil {
		s.fail(err)
		return nil, err
	}
	out := make([]*raft.SnapshotMeta, len(list))
	for i := range list {
		out[i] = list[i].raftMeta()
	}
	return out, nil
}

// collectKeys adds the numbers of the data keys under which the snapshots are encrypted to used. It
// returns an error if the data key of the newest snapshot is missing.
func (s *snapshotStore) collectKeys(used map[uint32]struct{}) error {
	list, err := s.readHeaders()
	if err != nil {
		return err
	}
	for i, k := range list {
		if k.Key == 0 {
			continue
		}
		used[k.Key] = struct{}{}
		if i > 0 {
			continue // only the newest snapshot is read
		}
		if _, err := s.sealer.findDataKey(k.Key); err != nil {
			return fmt.Errorf("%s: %w", s.filePath(k.id), err)
		}
	}
	return nil
}

// Open implements raft.SnapshotStore. The content is verified while it is read. If the snapshot is
// damaged, a read returns an error other than io.EOF.
func (s *snapshotStore) Open(id string) (*raft.SnapshotMeta, io.ReadCloser, error) {
	s.opening.RLock()
	defer s.opening.RUnlock()
	f, err := s.openFile(id)
	if err != nil {
		return nil, nil, fmt.Errorf("snapshot: %w", err)
	}
	k, r, err := s.newReader(f, id)
	if err != nil {
		s.fail(err)
		return nil, nil, errors.Join(err, f.Close())
	}
	return k.raftMeta(), &snapshotContent{store: s, id: id, r: r, f: f}, nil
}

func (s *snapshotStore) newReader(f durable.File, id string) (storedSnapshot, io.Reader, error) {
	k, head, err := s.readHead(f, id)
	if err != nil {
		return k, nil, err
	}
	from := int64(len(head))
	raw := bufio.NewReaderSize(io.NewSectionReader(f, from, 1<<62), 64<<10)
	if k.Key == 0 {
		return k, newFrameReader(raw, head, nil), nil
	}
	key, err := s.sealer.findDataKey(k.Key)
	if err != nil {
		return k, nil, fmt.Errorf("%s: %w", s.filePath(id), err)
	}
	return k, newFrameReader(raw, head, deriveFileKey(key.secret[:], k.Salt, head, snapshotKey)), nil
}

type snapshotContent struct {
	store *snapshotStore
	id    string
	r     io.Reader
	f     durable.File
	once  sync.Once
}

// Read implements io.Reader. An error other than io.EOF also stops the replica.
func (c *snapshotContent) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if err != nil && err != io.EOF {
		err = c.store.corruptError(c.id, err)
		c.once.Do(func() { c.store.fail(err) })
	}
	return n, err
}

// Close implements io.Closer.
func (c *snapshotContent) Close() error { return c.f.Close() }

// Create implements raft.SnapshotStore. The new snapshot is encrypted if there is a current data
// key.
func (s *snapshotStore) Create(version raft.SnapshotVersion, index, term uint64, configuration raft.Configuration,
	configurationIndex uint64, _ raft.Transport) (raft.SnapshotSink, error) {
	h := snapshotHeader{
		Version: version, Index: index, Term: term,
		Configuration: configuration, ConfigurationIndex: configurationIndex, Taken: s.now().UnixMilli(),
	}
	for { // the ID contains the time in milliseconds
		if there, err := durable.Exists(s.filePath(snapshotID(h))); err == nil && !there {
			break
		}
		h.Taken++
	}
	key, release := s.sealer.holdKey()
	if key != nil {
		h.Key, h.Salt = key.number, make([]byte, snapshotSalt)
		rand.Read(h.Salt)
	}
	content, err := json.Marshal(h)
	if err != nil {
		release()
		return nil, fmt.Errorf("snapshot: %w", err)
	}
	head := encodeHeader(snapshotMagic, content)
	path := s.filePath(snapshotID(h))
	f, err := s.files.Open(path+durable.TempSuffix, os.O_RDWR|os.O_CREATE|os.O_TRUNC)
	if err != nil {
		release()
		return nil, s.failWrite(path, err)
	}
	sink := &snapshotSink{store: s, id: snapshotID(h), path: path, f: f, release: release}
	sink.w = bufio.NewWriterSize(&offsetWriter{f: f}, 256<<10)
	if key == nil {
		sink.frames, err = newFrameWriter(sink.w, head, nil)
	} else {
		sink.frames, err = newFrameWriter(sink.w, head, deriveFileKey(key.secret[:], h.Salt, head, snapshotKey))
	}
	if err != nil {
		return nil, errors.Join(s.failWrite(path, err), sink.Cancel())
	}
	return sink, nil
}

// failWrite stops the replica because of a failed write of the file at path. It returns the error
// with the path.
func (s *snapshotStore) failWrite(path string, err error) error {
	err = fmt.Errorf("writing snapshot %s: %w", path, err)
	s.fail(err)
	return err
}

// offsetWriter is an io.Writer that appends to a file.
type offsetWriter struct {
	f  durable.File
	at int64
}

func (p *offsetWriter) Write(b []byte) (int, error) {
	n, err := p.f.WriteAt(b, p.at)
	p.at += int64(n)
	return n, err
}

type snapshotSink struct {
	store  *snapshotStore
	id     string
	path   string
	f      durable.File
	w      *bufio.Writer
	frames *frameWriter
	// release permits the removal of the data key (see sealer.holdKey). It is called when the file
	// has its name, or will never get it.
	release func()
	over    bool
}

// ID implements raft.SnapshotSink.
func (k *snapshotSink) ID() string { return k.id }

// Write implements io.Writer.
func (k *snapshotSink) Write(p []byte) (int, error) {
	n, err := k.frames.Write(p)
	if err != nil {
		err = k.store.failWrite(k.path, err)
	}
	return n, err
}

// Close implements raft.SnapshotSink. When it returns nil, the snapshot is complete and durable.
func (k *snapshotSink) Close() error {
	if k.over {
		return nil
	}
	err := k.frames.writeEnd()
	if err == nil {
		err = k.w.Flush()
	}
	if err == nil {
		err = k.f.Sync()
	}
	if err != nil {
		return errors.Join(k.store.failWrite(k.path, err), k.Cancel())
	}
	k.over = true
	defer k.release()
	if err = k.f.Close(); err == nil {
		err = durable.Rename(k.path+durable.TempSuffix, k.path)
	}
	if err != nil {
		return k.store.failWrite(k.path, err)
	}
	return k.store.removeOldest()
}

// Cancel implements raft.SnapshotSink. It removes the incomplete file.
func (k *snapshotSink) Cancel() error {
	if k.over {
		return nil
	}
	k.over = true
	defer k.release()
	return errors.Join(k.f.Close(), os.Remove(k.path+durable.TempSuffix))
}

// removeOldest removes all snapshots except the newest snapshotsKept ones.
func (s *snapshotStore) removeOldest() error {
	list, err := s.readHeaders()
	if err != nil {
		s.fail(err)
		return err
	}
	for _, k := range list[min(len(list), snapshotsKept):] {
		if err := s.removeSnapshot(k.id); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("removing an old snapshot: %w", err)
		}
	}
	return nil
}

// removeSnapshot removes a snapshot in small steps. If a gigabyte were released in one step, the
// file system would delay flushes of the log and other operations for more than a tenth of a
// second.
//
// The file is first renamed, durably, to the name of an incomplete snapshot, so that a power
// failure cannot leave a truncated snapshot. If the snapshot has a reader, the file is removed in
// one step: the reader can continue to read it.
func (s *snapshotStore) removeSnapshot(id string) error {
	path := s.filePath(id) + durable.TempSuffix
	if err := durable.Rename(s.filePath(id), path); err != nil {
		return err
	}
	if !s.readers.hasReader(id) { // after the rename, the file gets no new reader
		truncateGradually(path)
	}
	return os.Remove(path)
}
