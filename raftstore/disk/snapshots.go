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

	"keelson.dev/keelson/raftstore/disk/platter"
)

// ErrCorruptSnapshot reports a snapshot file that is not what was written.
var ErrCorruptSnapshot = errors.New("raftstore: snapshot is corrupt")

const (
	snapshotsName  = "snapshots"
	snapshotMagic  = "keelsnap"
	snapshotSuffix = ".snap"
	// snapshotsKept is how many stay. The newest is all that is ever read; the
	// other is for a person in need.
	snapshotsKept = 2
	snapshotSalt  = 32
	snapshotKey   = "keelson snapshot "
)

// snapshotStore is a raft.SnapshotStore: one file for each snapshot, checked
// as a whole and sealed when the replica has keys. What is read is in clear, so
// that a replica can send it to one with other keys.
//
// A file that cannot be read stops the replica; raft would go on with an older
// snapshot, whose log is gone.
type snapshotStore struct {
	dir   string
	files platter.Layer
	seals *sealer
	fail  func(error)
	now   func() time.Time

	readers *readers
	opening *sync.RWMutex // held for reading from before a file is opened until its data key is there
}

// readers counts who has a snapshot open.
type readers struct {
	mu sync.Mutex
	of map[string]int // by id; who is not there is not read
}

func (r *readers) add(id string, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of[id] += n; r.of[id] == 0 {
		delete(r.of, id)
	}
}

func (r *readers) any(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.of[id] > 0
}

// snapshotHeader is what a snapshot says of itself.
type snapshotHeader struct {
	Version            raft.SnapshotVersion
	Index              uint64
	Term               uint64
	Configuration      raft.Configuration
	ConfigurationIndex uint64
	Taken              int64  // unix milliseconds
	Key                uint32 `json:",omitempty"` // number of the data key; 0 = in clear
	Salt               []byte `json:",omitempty"`
}

func newSnapshotStore(c Config, seals *sealer, fail func(error)) *snapshotStore {
	return &snapshotStore{
		dir: filepath.Join(c.Dir, snapshotsName), files: c.files(), seals: seals, fail: fail, now: c.Now,
		readers: &readers{of: make(map[string]int)}, opening: new(sync.RWMutex),
	}
}

// openSnapshots makes the folder and clears what a crash left in it.
func openSnapshots(c Config, seals *sealer, fail func(error)) (*snapshotStore, error) {
	s := newSnapshotStore(c, seals, fail)
	if err := platter.MakeFolder(s.dir); err != nil {
		return nil, fmt.Errorf("snapshots: %w", err)
	}
	list, err := os.ReadDir(s.dir)
	for _, e := range list {
		if strings.HasSuffix(e.Name(), platter.NewSuffix) {
			err = errors.Join(err, os.Remove(filepath.Join(s.dir, e.Name())))
		}
	}
	if err != nil {
		return nil, fmt.Errorf("snapshots: %w", err)
	}
	return s, nil
}

// kept is a snapshot as found in the folder.
type kept struct {
	snapshotHeader
	id   string
	size int64 // of the content
}

// list reads head and end of every snapshot, newest first.
func (s *snapshotStore) list() ([]kept, error) {
	files, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("snapshots: %w", err)
	}
	var out []kept
	for _, e := range files {
		id, ok := strings.CutSuffix(e.Name(), snapshotSuffix)
		if !ok {
			continue
		}
		k, err := s.look(id)
		if errors.Is(err, os.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		out = append(out, k)
	}
	slices.SortFunc(out, func(a, b kept) int {
		return -cmp.Or(cmp.Compare(a.Term, b.Term), cmp.Compare(a.Index, b.Index), cmp.Compare(a.Taken, b.Taken))
	})
	return out, nil
}

func (s *snapshotStore) path(id string) string { return filepath.Join(s.dir, id+snapshotSuffix) }

// open opens a snapshot for reading. As long as it is open nobody cuts it.
func (s *snapshotStore) open(id string) (platter.File, error) {
	s.readers.add(id, 1) // before it is open: once it has lost its name it is too late
	f, err := s.files.Open(s.path(id), os.O_RDONLY)
	if err != nil {
		s.readers.add(id, -1)
		return nil, err
	}
	return &readFile{File: f, over: sync.OnceFunc(func() { s.readers.add(id, -1) })}, nil
}

// readFile is a snapshot that is read.
type readFile struct {
	platter.File
	over func()
}

// Close implements io.Closer.
func (f *readFile) Close() error {
	f.over()
	return f.File.Close()
}

// look reads head and end of a snapshot.
func (s *snapshotStore) look(id string) (kept, error) {
	f, err := s.open(id)
	if err != nil {
		return kept{}, fmt.Errorf("snapshot: %w", err)
	}
	defer f.Close()
	k, _, err := s.head(f, id)
	return k, err
}

func (s *snapshotStore) bad(id string, err error) error {
	return fmt.Errorf("%s: %w: %w", s.path(id), err, ErrCorruptSnapshot)
}

func (s *snapshotStore) head(f platter.File, id string) (kept, []byte, error) {
	k := kept{id: id}
	length, err := f.Size()
	if err != nil {
		return k, nil, fmt.Errorf("%s: %w", s.path(id), err)
	}
	content, all, err := readHeader(io.NewSectionReader(f, 0, length), snapshotMagic)
	if err == nil {
		err = json.Unmarshal(content, &k.snapshotHeader)
	}
	if err != nil {
		return k, nil, s.bad(id, err)
	}
	if k.id != snapshotID(k.snapshotHeader) {
		return k, nil, s.bad(id, fmt.Errorf("it is snapshot %s", snapshotID(k.snapshotHeader)))
	}
	end := make([]byte, footerBytes)
	if n, err := f.ReadAt(end, max(0, length-footerBytes)); n < len(end) {
		return k, nil, s.bad(id, endsEarly(err))
	}
	if k.size, err = parseFooter(end); err != nil {
		return k, nil, s.bad(id, err)
	}
	return k, all, nil
}

func snapshotID(h snapshotHeader) string {
	return fmt.Sprintf("%d-%d-%d", h.Term, h.Index, h.Taken)
}

func (k kept) meta() *raft.SnapshotMeta {
	return &raft.SnapshotMeta{
		Version: k.Version, ID: k.id, Index: k.Index, Term: k.Term,
		Configuration: k.Configuration, ConfigurationIndex: k.ConfigurationIndex, Size: k.size,
	}
}

// List implements raft.SnapshotStore.
func (s *snapshotStore) List() ([]*raft.SnapshotMeta, error) {
	list, err := s.list()
	if err != nil {
		s.fail(err)
		return nil, err
	}
	out := make([]*raft.SnapshotMeta, len(list))
	for i := range list {
		out[i] = list[i].meta()
	}
	return out, nil
}

// keys are the data keys that the snapshots need.
func (s *snapshotStore) keys(used map[uint32]struct{}) error {
	list, err := s.list()
	if err != nil {
		return err
	}
	for i, k := range list {
		if k.Key == 0 {
			continue
		}
		used[k.Key] = struct{}{}
		if i > 0 {
			continue // never read
		}
		if _, err := s.seals.key(k.Key); err != nil {
			return fmt.Errorf("%s: %w", s.path(k.id), err)
		}
	}
	return nil
}

// Open implements raft.SnapshotStore. The content is checked while it is read;
// what is damaged ends with an error and not with io.EOF.
func (s *snapshotStore) Open(id string) (*raft.SnapshotMeta, io.ReadCloser, error) {
	s.opening.RLock()
	defer s.opening.RUnlock()
	f, err := s.open(id)
	if err != nil {
		return nil, nil, fmt.Errorf("snapshot: %w", err)
	}
	k, r, err := s.reader(f, id)
	if err != nil {
		s.fail(err)
		return nil, nil, errors.Join(err, f.Close())
	}
	return k.meta(), &snapshotContent{store: s, id: id, r: r, f: f}, nil
}

func (s *snapshotStore) reader(f platter.File, id string) (kept, io.Reader, error) {
	k, head, err := s.head(f, id)
	if err != nil {
		return k, nil, err
	}
	from := int64(len(head))
	raw := bufio.NewReaderSize(io.NewSectionReader(f, from, 1<<62), 64<<10)
	if k.Key == 0 {
		return k, newFrameReader(raw, head, nil), nil
	}
	key, err := s.seals.key(k.Key)
	if err != nil {
		return k, nil, fmt.Errorf("%s: %w", s.path(id), err)
	}
	return k, newFrameReader(raw, head, fileKey(key.secret[:], k.Salt, head, snapshotKey)), nil
}

type snapshotContent struct {
	store *snapshotStore
	id    string
	r     io.Reader
	f     platter.File
	once  sync.Once
}

// Read implements io.Reader.
func (c *snapshotContent) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if err != nil && err != io.EOF {
		err = c.store.bad(c.id, err)
		c.once.Do(func() { c.store.fail(err) })
	}
	return n, err
}

// Close implements io.Closer.
func (c *snapshotContent) Close() error { return c.f.Close() }

// Create implements raft.SnapshotStore.
func (s *snapshotStore) Create(version raft.SnapshotVersion, index, term uint64, configuration raft.Configuration,
	configurationIndex uint64, _ raft.Transport) (raft.SnapshotSink, error) {
	h := snapshotHeader{
		Version: version, Index: index, Term: term,
		Configuration: configuration, ConfigurationIndex: configurationIndex, Taken: s.now().UnixMilli(),
	}
	for { // two in one millisecond
		if there, err := platter.Exists(s.path(snapshotID(h))); err == nil && !there {
			break
		}
		h.Taken++
	}
	key, release := s.seals.hold()
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
	path := s.path(snapshotID(h))
	f, err := s.files.Open(path+platter.NewSuffix, os.O_RDWR|os.O_CREATE|os.O_TRUNC)
	if err != nil {
		release()
		return nil, s.lost(path, err)
	}
	sink := &snapshotSink{store: s, id: snapshotID(h), path: path, f: f, release: release}
	sink.w = bufio.NewWriterSize(&placed{f: f}, 256<<10)
	if key == nil {
		sink.frames, err = newFrameWriter(sink.w, head, nil)
	} else {
		sink.frames, err = newFrameWriter(sink.w, head, fileKey(key.secret[:], h.Salt, head, snapshotKey))
	}
	if err != nil {
		return nil, errors.Join(s.lost(path, err), sink.Cancel())
	}
	return sink, nil
}

// lost stops the replica: its disk takes no more.
func (s *snapshotStore) lost(path string, err error) error {
	err = fmt.Errorf("writing snapshot %s: %w", path, err)
	s.fail(err)
	return err
}

// placed writes one piece after the other.
type placed struct {
	f  platter.File
	at int64
}

func (p *placed) Write(b []byte) (int, error) {
	n, err := p.f.WriteAt(b, p.at)
	p.at += int64(n)
	return n, err
}

type snapshotSink struct {
	store  *snapshotStore
	id     string
	path   string
	f      platter.File
	w      *bufio.Writer
	frames *frameWriter
	// release gives up the data key: the file has its name, or never gets it.
	release func()
	over    bool
}

// ID implements raft.SnapshotSink.
func (k *snapshotSink) ID() string { return k.id }

// Write implements io.Writer.
func (k *snapshotSink) Write(p []byte) (int, error) {
	n, err := k.frames.Write(p)
	if err != nil {
		err = k.store.lost(k.path, err)
	}
	return n, err
}

// Close implements raft.SnapshotSink: the snapshot is on the disk, whole.
func (k *snapshotSink) Close() error {
	if k.over {
		return nil
	}
	err := k.frames.finish()
	if err == nil {
		err = k.w.Flush()
	}
	if err == nil {
		err = k.f.Sync()
	}
	if err != nil {
		return errors.Join(k.store.lost(k.path, err), k.Cancel())
	}
	k.over = true
	defer k.release()
	if err = k.f.Close(); err == nil {
		err = platter.MoveFile(k.path+platter.NewSuffix, k.path)
	}
	if err != nil {
		return k.store.lost(k.path, err)
	}
	return k.store.reap()
}

// Cancel implements raft.SnapshotSink.
func (k *snapshotSink) Cancel() error {
	if k.over {
		return nil
	}
	k.over = true
	defer k.release()
	return errors.Join(k.f.Close(), os.Remove(k.path+platter.NewSuffix))
}

// reap removes the oldest.
func (s *snapshotStore) reap() error {
	list, err := s.list()
	if err != nil {
		s.fail(err)
		return err
	}
	for _, k := range list[min(len(list), snapshotsKept):] {
		if err := s.remove(k.id); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("removing an old snapshot: %w", err)
		}
	}
	return nil
}

// remove removes a snapshot, bit by bit: to give a gigabyte back at once keeps
// the file system from everything else for a tenth of a second and more, the
// flushes of the log among it. First it gets the name of one that is not whole,
// for good: should the power fail meanwhile it is none. Whoever reads it goes
// on reading it; then it goes as a whole.
func (s *snapshotStore) remove(id string) error {
	path := s.path(id) + platter.NewSuffix
	if err := platter.MoveFile(s.path(id), path); err != nil {
		return err
	}
	if !s.readers.any(id) { // nor will it be: it has no name by which it could
		cutSlowly(path)
	}
	return os.Remove(path)
}
