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
	// ErrForeignBackup is returned for a backup of another cluster than the expected one.
	ErrForeignBackup = errors.New("raftstore: backup is of another cluster")
	// ErrBackupFormat is returned for a file that is not a backup, or for a backup with an
	// unsupported format version.
	ErrBackupFormat = errors.New("raftstore: not a backup of a supported format")
	// ErrCorruptBackup is returned for a damaged backup.
	ErrCorruptBackup = errors.New("raftstore: backup is corrupt")
)

const (
	backupMagic   = "keelback"
	backupPurpose = "keelson backup "
)

// BackupInfo describes the content of a backup.
type BackupInfo struct {
	Cluster  string
	Revision raftstore.Revision
	Created  time.Time
	Keys     int
	Bytes    int64 // sum of key and value sizes
	Format   uint32
	Sealed   bool
	KeyID    string // ID of the key-encryption key; "" if the backup is not encrypted
}

// backupHeader is the JSON header of a backup; frames.go describes the format of the file. The
// header of an encrypted backup contains the key that encrypts this file, wrapped under a
// key-encryption key. No other file is needed to decrypt the backup.
type backupHeader struct {
	Cluster  string             `json:"Cluster"`
	Revision raftstore.Revision `json:"Revision"`
	Created  int64              `json:"Created"` // unix milliseconds
	Keys     int                `json:"Keys"`
	Bytes    int64              `json:"Bytes"`
	KeyID    string             `json:"KeyID,omitempty"`
	Wrapped  []byte             `json:"Wrapped,omitempty"`
}

func (h backupHeader) backupInfo() BackupInfo {
	return BackupInfo{
		Cluster: h.Cluster, Revision: h.Revision, Created: time.UnixMilli(h.Created), Keys: h.Keys, Bytes: h.Bytes,
		Format: containerFormat, Sealed: h.KeyID != "", KeyID: h.KeyID,
	}
}

// WriteBackup writes the state v to w as a backup. The backup is encrypted if this data directory
// has a current key-encryption key. It contains the identity of the cluster and the time of its
// creation.
func (d *Data) WriteBackup(w io.Writer, cluster string, created time.Time, v *mvcc.View) error {
	return writeBackup(w, newBackupHeader(cluster, created, v), d.sealer.wrappingKey(), v.Snapshot())
}

// WriteClearBackup writes the state v to w as an unencrypted backup. The caller is responsible for
// encrypting the output.
func WriteClearBackup(w io.Writer, cluster string, created time.Time, v *mvcc.View) error {
	return writeBackup(w, newBackupHeader(cluster, created, v), nil, v.Snapshot())
}

func newBackupHeader(cluster string, created time.Time, v *mvcc.View) backupHeader {
	return backupHeader{
		Cluster: cluster, Revision: v.Revision(), Created: created.UnixMilli(), Keys: v.Keys(), Bytes: v.Bytes(),
	}
}

// wrappingKey returns the current key-encryption key, or nil if new data is not encrypted.
func (s *sealer) wrappingKey() *keyEncryptionKey {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ring.findKey(s.ring.Current())
}

func writeBackup(w io.Writer, h backupHeader, kek *keyEncryptionKey, state *mvcc.Snapshot) error {
	sum := sha256.New()
	out := bufio.NewWriterSize(io.MultiWriter(w, sum), 256<<10)
	var secret []byte
	if kek != nil {
		secret = make([]byte, keyBytes)
		rand.Read(secret)
		h.KeyID, h.Wrapped = kek.id, wrapKey(kek, 0, secret)
	}
	content, err := json.Marshal(h)
	if err != nil {
		return err
	}
	head := encodeHeader(backupMagic, content)
	var aead cipher.AEAD
	if kek != nil {
		aead = deriveFileKey(secret, nil, head, backupPurpose)
	}
	frames, err := newFrameWriter(out, head, aead)
	if err == nil {
		err = state.Dump(frames, mvcc.Meta{Cluster: h.Cluster})
	}
	if err == nil {
		err = frames.writeEnd()
	}
	if err == nil {
		err = out.Flush()
	}
	if err == nil {
		_, err = w.Write(sum.Sum(nil))
	}
	return err
}

// backupReader reads a backup from its start to its end.
type backupReader struct {
	info   BackupInfo
	raw    *bufio.Reader // the part of the backup that has not been read yet
	sum    hash.Hash
	frames *frameReader
}

func openBackup(r io.Reader, keys *Keyring) (*backupReader, error) {
	b := &backupReader{raw: bufio.NewReaderSize(r, 256<<10), sum: sha256.New()}
	content, head, err := readHeader(hashingReader{b.raw, b.sum}, backupMagic)
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
	b.info = h.backupInfo()
	var aead cipher.AEAD
	if h.KeyID != "" {
		kek := keys.findKey(h.KeyID)
		if kek == nil {
			return b, fmt.Errorf("backup is encrypted under key %q, which is missing (%s): %w",
				h.KeyID, keys.source(), ErrSealed)
		}
		secret, err := unwrapKey(kek, 0, h.Wrapped)
		if err != nil {
			return b, fmt.Errorf("backup cannot be decrypted with key %q of %s: %w", h.KeyID, keys.source(), ErrSealed)
		}
		aead = deriveFileKey(secret, nil, head, backupPurpose)
	}
	b.frames = newFrameReader(hashingReader{b.raw, b.sum}, head, aead)
	return b, nil
}

// loadState reads the state from the backup into a new state machine, and verifies the backup up to
// its last byte.
func (b *backupReader) loadState() (*mvcc.Machine, error) {
	machine, _, err := mvcc.Load(b.frames)
	if err != nil && !errors.Is(err, mvcc.ErrCorrupt) {
		return nil, fmt.Errorf("backup: %w: %w", err, ErrBackupFormat)
	}
	if err == nil {
		var n int
		if n, err = b.frames.Read(make([]byte, 1)); n > 0 {
			err = errors.New("data after the state")
		} else if err == io.EOF {
			err = nil
		}
	}
	if err == nil {
		err = b.checkEnd()
	}
	if err != nil {
		return nil, fmt.Errorf("backup: %w: %w", err, ErrCorruptBackup)
	}
	v := machine.View()
	if v.Revision() != b.info.Revision || v.Keys() != b.info.Keys || v.Bytes() != b.info.Bytes {
		return nil,
			fmt.Errorf("backup: the header has revision %d, %d keys and %d bytes, the content has revision %d, %d "+
				"keys and %d bytes: %w",
				b.info.Revision, b.info.Keys, b.info.Bytes, v.Revision(), v.Keys(), v.Bytes(), ErrCorruptBackup)
	}
	return machine, nil
}

func (b *backupReader) checkEnd() error {
	want := b.sum.Sum(nil)
	var have [sha256.Size]byte
	if _, err := io.ReadFull(b.raw, have[:]); err != nil {
		return truncationError(err)
	}
	if string(have[:]) != string(want) {
		return errors.New("checksum of the whole backup does not match")
	}
	if _, err := b.raw.ReadByte(); err != io.EOF {
		return errors.Join(errors.New("data after the end of the backup"), err)
	}
	return nil
}

// VerifyBackup reads a whole backup and returns a description of it. Any damage is an error. If the
// backup is encrypted under a key that is not in keys, VerifyBackup returns the information of the
// header, and ErrSealed.
func VerifyBackup(r io.Reader, keys *Keyring) (BackupInfo, error) {
	info, _, err := ReadBackupValue(r, keys, "")
	return info, err
}

// ReadBackupValue verifies a backup and returns the value that the store's key has in it. The value
// is nil if the backup does not contain the key.
func ReadBackupValue(r io.Reader, keys *Keyring, key string) (info BackupInfo, value []byte, err error) {
	info, v, err := ReadBackup(r, keys)
	if err != nil {
		return info, nil, err
	}
	if it, ok := v.Get(key); ok {
		value = it.Value
	}
	return info, value, nil
}

// ReadBackupCluster returns the identity of the cluster from the header of a backup. It reads only
// the header, and needs no encryption key.
func ReadBackupCluster(r io.Reader) (string, error) {
	content, _, err := readHeader(r, backupMagic)
	if err != nil {
		return "", fmt.Errorf("backup: %w", err)
	}
	var h backupHeader
	err = json.Unmarshal(content, &h)
	return h.Cluster, err
}

// ReadBackup verifies a backup and returns the state that it contains.
func ReadBackup(r io.Reader, keys *Keyring) (BackupInfo, *mvcc.View, error) {
	b, err := openBackup(r, keys)
	if err != nil {
		if b != nil {
			return b.info, nil, err
		}
		return BackupInfo{}, nil, err
	}
	machine, err := b.loadState()
	if err != nil {
		return BackupInfo{}, nil, err
	}
	return b.info, machine.View(), nil
}
