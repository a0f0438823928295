package disk

import (
	"bufio"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

var (
	// ErrForeignBackup reports a backup of another cluster.
	ErrForeignBackup = errors.New("raftstore: backup is of another cluster")
	// ErrBackupFormat reports a backup of another format version, or a file that is no backup.
	ErrBackupFormat = errors.New("raftstore: not a backup that this version reads")
	// ErrCorruptBackup reports a backup that is damaged.
	ErrCorruptBackup = errors.New("raftstore: backup is corrupt")
)

const (
	backupMagic   = "keelback"
	backupPurpose = "keelson backup "
)

// BackupInfo describes a backup.
type BackupInfo struct {
	Cluster  string
	Revision raftstore.Revision
	Created  time.Time
	Keys     int
	Bytes    int64 // sum of key and value sizes
	Format   uint32
	Sealed   bool
	KeyID    string // of the key-encryption key it is sealed under
}

// backupHeader is the head of a backup (container.go). A sealed one carries the
// key it is sealed under, wrapped; the file is all that is needed besides the
// key-encryption key.
type backupHeader struct {
	Cluster  string             `json:"Cluster"`
	Revision raftstore.Revision `json:"Revision"`
	Created  int64              `json:"Created"` // unix milliseconds
	Keys     int                `json:"Keys"`
	Bytes    int64              `json:"Bytes"`
	KeyID    string             `json:"KeyID,omitempty"`
	Wrapped  []byte             `json:"Wrapped,omitempty"`
}

func (h backupHeader) info() BackupInfo {
	return BackupInfo{
		Cluster: h.Cluster, Revision: h.Revision, Created: time.UnixMilli(h.Created), Keys: h.Keys, Bytes: h.Bytes,
		Format: containerFormat, Sealed: h.KeyID != "", KeyID: h.KeyID,
	}
}

// WriteBackup writes a state to w as a backup, sealed when the data of this
// disk is. cluster and created are noted in it.
func (d *Data) WriteBackup(w io.Writer, cluster string, created time.Time, v *mvcc.View) error {
	h := backupHeader{Cluster: cluster, Revision: v.Revision(), Created: created.UnixMilli(), Keys: v.Keys(), Bytes: v.Bytes()}
	return writeBackup(w, h, d.seals.wrapper(), v.Snapshot())
}

// WriteClearBackup writes a state to w as a backup in clear, for who seals it himself.
func WriteClearBackup(w io.Writer, cluster string, created time.Time, v *mvcc.View) error {
	h := backupHeader{Cluster: cluster, Revision: v.Revision(), Created: created.UnixMilli(), Keys: v.Keys(), Bytes: v.Bytes()}
	return writeBackup(w, h, nil, v.Snapshot())
}

// wrapper is the key-encryption key for what is new; nil when it is written in clear.
func (s *sealer) wrapper() *keyEncryptionKey {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ring.find(s.ring.Current())
}

func writeBackup(w io.Writer, h backupHeader, kek *keyEncryptionKey, state *mvcc.Snapshot) error {
	sum := sha256.New()
	out := bufio.NewWriterSize(io.MultiWriter(w, sum), 256<<10)
	var secret []byte
	if kek != nil {
		secret = make([]byte, keyBytes)
		rand.Read(secret)
		h.KeyID, h.Wrapped = kek.id, wrap(kek, 0, secret)
	}
	content, err := json.Marshal(h)
	if err != nil {
		return err
	}
	head := encodeHeader(backupMagic, content)
	var aead cipher.AEAD
	if kek != nil {
		aead = fileKey(secret, nil, head, backupPurpose)
	}
	frames, err := newFrameWriter(out, head, aead)
	if err == nil {
		err = state.Dump(frames, mvcc.Meta{Cluster: h.Cluster})
	}
	if err == nil {
		err = frames.finish()
	}
	if err == nil {
		err = out.Flush()
	}
	if err == nil {
		_, err = w.Write(sum.Sum(nil))
	}
	return err
}

// backupReader reads a backup from its beginning.
type backupReader struct {
	info   BackupInfo
	raw    *bufio.Reader // the rest, as it is
	sum    hash.Hash
	frames *frameReader
}

func openBackup(r io.Reader, keys *Keyring) (*backupReader, error) {
	b := &backupReader{raw: bufio.NewReaderSize(r, 256<<10), sum: sha256.New()}
	content, head, err := readHeader(summed{b.raw, b.sum}, backupMagic)
	var format *formatError
	switch {
	case errors.As(err, &format):
		return nil, fmt.Errorf("backup: %w: %w", err, ErrBackupFormat)
	case err != nil:
		return nil, fmt.Errorf("backup: %w: %w", err, ErrCorruptBackup)
	}
	var h backupHeader
	if err := json.Unmarshal(content, &h); err != nil {
		return nil, fmt.Errorf("backup: header: %w: %w", err, ErrCorruptBackup)
	}
	b.info = h.info()
	var aead cipher.AEAD
	if h.KeyID != "" {
		kek := keys.find(h.KeyID)
		if kek == nil {
			return b, fmt.Errorf("backup is sealed under key %q, which is not there (%s): %w", h.KeyID, keys.where(), ErrSealed)
		}
		secret, err := unwrap(kek, 0, h.Wrapped)
		if err != nil {
			return b, fmt.Errorf("backup does not open with key %q of %s: %w", h.KeyID, keys.where(), ErrSealed)
		}
		aead = fileKey(secret, nil, head, backupPurpose)
	}
	b.frames = newFrameReader(summed{b.raw, b.sum}, head, aead)
	return b, nil
}

// load reads the state, and checks everything up to the last byte.
func (b *backupReader) load() (*mvcc.Machine, error) {
	machine, _, err := mvcc.Load(b.frames)
	if err != nil && !errors.Is(err, mvcc.ErrCorrupt) {
		return nil, fmt.Errorf("backup: %w: %w", err, ErrBackupFormat)
	}
	if err == nil {
		var n int
		if n, err = b.frames.Read(make([]byte, 1)); n > 0 {
			err = errors.New("it goes on after the state")
		} else if err == io.EOF {
			err = nil
		}
	}
	if err == nil {
		err = b.end()
	}
	if err != nil {
		return nil, fmt.Errorf("backup: %w: %w", err, ErrCorruptBackup)
	}
	v := machine.View()
	if v.Revision() != b.info.Revision || v.Keys() != b.info.Keys || v.Bytes() != b.info.Bytes {
		return nil, fmt.Errorf("backup: header tells of revision %d, %d keys and %d bytes, there are revision %d, %d keys and %d bytes: %w",
			b.info.Revision, b.info.Keys, b.info.Bytes, v.Revision(), v.Keys(), v.Bytes(), ErrCorruptBackup)
	}
	return machine, nil
}

func (b *backupReader) end() error {
	want := b.sum.Sum(nil)
	var have [sha256.Size]byte
	if _, err := io.ReadFull(b.raw, have[:]); err != nil {
		return endsEarly(err)
	}
	if string(have[:]) != string(want) {
		return errors.New("checksum of the whole does not match")
	}
	if _, err := b.raw.ReadByte(); err != io.EOF {
		return errors.Join(errors.New("it goes on after its end"), err)
	}
	return nil
}

// VerifyBackup reads a whole backup and says what is in it. Any damage is an
// error. Of a sealed one whose key is not in keys, it says what the header
// tells, and ErrSealed.
func VerifyBackup(r io.Reader, keys *Keyring) (BackupInfo, error) {
	info, _, err := FromBackup(r, keys, "")
	return info, err
}

// FromBackup is VerifyBackup that also returns the value of a key; nil when the backup has none.
func FromBackup(r io.Reader, keys *Keyring, key string) (info BackupInfo, value []byte, err error) {
	info, v, err := ReadBackup(r, keys)
	if err != nil {
		return info, nil, err
	}
	if it, ok := v.Get(key); ok {
		value = it.Value
	}
	return info, value, nil
}

// BackupCluster is of which cluster the head of a backup says that it is. Nothing behind the head is looked at, and no key
// is needed.
func BackupCluster(r io.Reader) (string, error) {
	content, _, err := readHeader(r, backupMagic)
	if err != nil {
		return "", fmt.Errorf("backup: %w", err)
	}
	var h backupHeader
	err = json.Unmarshal(content, &h)
	return h.Cluster, err
}

// ReadBackup is VerifyBackup that also returns the state that the backup holds.
func ReadBackup(r io.Reader, keys *Keyring) (BackupInfo, *mvcc.View, error) {
	b, err := openBackup(r, keys)
	if err != nil {
		if b != nil {
			return b.info, nil, err
		}
		return BackupInfo{}, nil, err
	}
	machine, err := b.load()
	if err != nil {
		return BackupInfo{}, nil, err
	}
	return b.info, machine.View(), nil
}
