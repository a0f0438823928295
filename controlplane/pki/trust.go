package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Files of a trust folder, in which each replica stores the keys of its cluster. All have mode
// 0600; the folder has mode 0700.
const (
	FileCACert     = "ca.crt"
	FileCAKey      = "ca.key"
	FileServiceKey = "sa.key"
	// FileServiceTrusted exists only during a rotation of the service account key.
	FileServiceTrusted = "sa-trusted.pem" // public keys
	FileEncryptionKey  = "encryption.key"
	// FileStoreKeys is optional. It is absent if the stores are not encrypted or if the operator
	// keeps the key file elsewhere.
	FileStoreKeys = "store.keys"
)

// ErrExists is the error when the folder is not empty, so that no keys were written to it.
var ErrExists = errors.New("pki: the folder is not empty")

// EncryptionKeySize is the length of the secret that all replicas share, in bytes.
const EncryptionKeySize = 32

// Trust contains all keys and secrets that the replicas of one cluster share. It is immutable and
// safe for concurrent use.
type Trust struct {
	CA *CA
	// ServiceKey signs service account tokens.
	ServiceKey *ecdsa.PrivateKey
	// ServiceTrusted are further keys with accepted service account tokens.
	ServiceTrusted []*ecdsa.PublicKey
	// EncryptionKey is the secret from which the cluster derives its symmetric keys;
	// EncryptionKeySize bytes.
	EncryptionKey []byte
	// StoreKeys is the key file with which the replicas encrypt their stores, in the format of
	// raftstore/disk; nil if this folder has no key file. A joining replica receives it.
	StoreKeys []byte

	// PeerCA signs the replicas' peer certificates instead of CA; may be nil. PeerTrusted are
	// further peer CAs that replicas trust.
	PeerCA      *CA
	PeerTrusted []*x509.Certificate

	// CATrusted are CAs that are trusted in addition to CA during its rotation. CAFormer, one of
	// them, signs API server certificates until all clients trust CA; otherwise it is nil.
	CATrusted []*x509.Certificate
	CAFormer  *CA
}

// ClusterName returns the name passed to Init, which is part of the CA's subject.
func (t *Trust) ClusterName() string {
	return strings.TrimPrefix(t.CA.Cert.Subject.CommonName, caNamePrefix)
}

// NewTrust generates the keys of a new cluster in memory.
func NewTrust(clusterName string, now time.Time) (*Trust, error) {
	ca, err := NewCA(clusterName, now)
	if err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("pki: making the service account key: %w", err)
	}
	enc := make([]byte, EncryptionKeySize)
	rand.Read(enc) // never fails: crypto/rand ends the process if the kernel has no randomness
	return &Trust{CA: ca, ServiceKey: key, EncryptionKey: enc}, nil
}

// Init generates the keys of a new cluster and writes them to dir atomically. If dir contains any
// file, nothing is written and the error is ErrExists.
func Init(dir, clusterName string, now time.Time) (*Trust, error) {
	t, err := NewTrust(clusterName, now)
	if err != nil {
		return nil, err
	}
	if err := t.Save(dir); err != nil {
		return nil, err
	}
	return t, nil
}

// Save writes the keys to dir atomically, like Init. A joining replica uses it to store the keys
// that it has received.
func (t *Trust) Save(dir string) (err error) {
	b, err := t.bundle()
	if err != nil {
		return err
	}
	dir = filepath.Clean(dir)
	// The parent folder belongs to the daemon alone; folders above it may be shared.
	if err := os.MkdirAll(filepath.Dir(filepath.Dir(dir)), 0o755); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Dir(dir), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("pki: making the folder above %s: %w", dir, err)
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), "."+filepath.Base(dir)+"-")
	if err != nil {
		return fmt.Errorf("pki: making a folder beside %s: %w", dir, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(tmp))
		}
	}()
	for name, data := range b.files() {
		if err := WriteFile(filepath.Join(tmp, name), data); err != nil {
			return err
		}
	}
	// rename(2) atomically replaces an empty folder and rejects a non-empty one. Neither a crash
	// nor a concurrent Init can leave a mix of two clusters.
	switch err := syscall.Rename(tmp, dir); {
	case errors.Is(err, syscall.ENOTEMPTY), errors.Is(err, syscall.EEXIST):
		return fmt.Errorf("pki: writing the cluster's keys to %s: %w", dir, ErrExists)
	case err != nil:
		return fmt.Errorf("pki: moving the cluster's keys to %s: %w", dir, err)
	}
	return syncDir(filepath.Dir(dir))
}

// Load reads the keys that Init or Save wrote to dir. If dir contains no keys, the error wraps
// fs.ErrNotExist.
func Load(dir string) (*Trust, error) {
	var b bundle
	for name, into := range b.fields() {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return nil, fmt.Errorf("pki: reading the cluster's keys: %w", err)
		}
		*into = data
	}
	for name, into := range b.optional() {
		data, err := optional(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		*into = data
	}
	t, err := b.trust()
	if err != nil {
		return nil, fmt.Errorf("%w (in %s)", err, dir)
	}
	return t, nil
}

// Marshal encodes the keys for a joining replica. The result is secret and must only be sent over a
// pinned TLS connection.
func (t *Trust) Marshal() ([]byte, error) {
	b, err := t.bundle()
	if err != nil {
		return nil, err
	}
	return json.Marshal(b)
}

// UnmarshalTrust decodes and checks the result of Marshal.
func UnmarshalTrust(data []byte) (*Trust, error) {
	var b bundle
	if err := json.Unmarshal(data, &b); err != nil {
		return nil, fmt.Errorf("pki: unpacking the cluster's keys: %w", err)
	}
	return b.trust()
}

// bundle is the encoded form of a Trust: PEM, and the encryption key in hex.
type bundle struct {
	CACert        []byte `json:"caCert"`
	CAKey         []byte `json:"caKey"`
	ServiceKey    []byte `json:"serviceKey"`
	EncryptionKey []byte `json:"encryptionKey"`
	StoreKeys     []byte `json:"storeKeys,omitempty"`

	Peers        []byte `json:"peers,omitempty"`
	PeersTrusted []byte `json:"peersTrusted,omitempty"`

	ServiceTrusted []byte `json:"serviceTrusted,omitempty"`

	CATrusted []byte `json:"caTrusted,omitempty"`
	CAFormer  []byte `json:"caFormer,omitempty"`
	CANext    []byte `json:"-"` // see FileCANext
}

func (b *bundle) fields() map[string]*[]byte {
	return map[string]*[]byte{
		FileCACert: &b.CACert, FileCAKey: &b.CAKey,
		FileServiceKey: &b.ServiceKey, FileEncryptionKey: &b.EncryptionKey,
	}
}

// optional returns the files that may be absent, by name.
func (b *bundle) optional() map[string]*[]byte {
	return map[string]*[]byte{FilePeers: &b.Peers, FilePeersTrusted: &b.PeersTrusted, FileStoreKeys: &b.StoreKeys,
		FileServiceTrusted: &b.ServiceTrusted, FileCATrusted: &b.CATrusted, FileCAFormer: &b.CAFormer, FileCANext: &b.CANext}
}

func (b *bundle) files() map[string][]byte {
	out := map[string][]byte{}
	for name, p := range b.fields() {
		out[name] = *p
	}
	for name, p := range b.optional() {
		if len(*p) > 0 {
			out[name] = *p
		}
	}
	return out
}

func (t *Trust) bundle() (*bundle, error) {
	caKey, err := encodeKey(t.CA.key)
	if err != nil {
		return nil, err
	}
	serviceKey, err := encodeKey(t.ServiceKey)
	if err != nil {
		return nil, err
	}
	b := &bundle{
		CACert: t.CA.PEM(), CAKey: caKey, ServiceKey: serviceKey,
		EncryptionKey: []byte(hex.EncodeToString(t.EncryptionKey) + "\n"),
		PeersTrusted:  encodeCerts(t.PeerTrusted),
		StoreKeys:     t.StoreKeys,
	}
	if b.ServiceTrusted, err = encodePublic(t.ServiceTrusted); err != nil {
		return nil, err
	}
	if t.PeerCA != nil {
		if b.Peers, err = t.PeerCA.both(); err != nil {
			return nil, err
		}
	}
	b.CATrusted = encodeCerts(t.CATrusted)
	if t.CAFormer != nil {
		if b.CAFormer, err = t.CAFormer.both(); err != nil {
			return nil, err
		}
	}
	return b, nil
}

func (b *bundle) trust() (*Trust, error) {
	ca, err := b.clusterCA()
	if err != nil {
		return nil, err
	}
	serviceKey, err := decodeKey(b.ServiceKey)
	if err != nil {
		return nil, fmt.Errorf("pki: reading the service account key: %w", err)
	}
	enc, err := hex.DecodeString(strings.TrimSpace(string(b.EncryptionKey)))
	if err != nil || len(enc) != EncryptionKeySize {
		return nil, fmt.Errorf("pki: %s is not %d bytes in hex", FileEncryptionKey, EncryptionKeySize)
	}
	t := &Trust{CA: ca, ServiceKey: serviceKey, EncryptionKey: enc, StoreKeys: b.StoreKeys}
	if t.ServiceTrusted, err = decodePublic(b.ServiceTrusted); err != nil {
		return nil, fmt.Errorf("pki: %s: %w", FileServiceTrusted, err)
	}
	if len(b.Peers) > 0 {
		if t.PeerCA, err = readBoth(b.Peers); err != nil {
			return nil, fmt.Errorf("pki: %s: %w", FilePeers, err)
		}
	}
	if len(b.PeersTrusted) > 0 {
		if t.PeerTrusted, err = decodeCerts(b.PeersTrusted); err != nil {
			return nil, fmt.Errorf("pki: %s: %w", FilePeersTrusted, err)
		}
	}
	if len(b.CATrusted) > 0 {
		if t.CATrusted, err = decodeCerts(b.CATrusted); err != nil {
			return nil, fmt.Errorf("pki: %s: %w", FileCATrusted, err)
		}
	}
	if len(b.CAFormer) > 0 {
		if t.CAFormer, err = readBoth(b.CAFormer); err != nil {
			return nil, fmt.Errorf("pki: %s: %w", FileCAFormer, err)
		}
	}
	return t, nil
}

func (b *bundle) clusterCA() (*CA, error) {
	if len(b.CANext) > 0 {
		ca, err := readBoth(b.CANext)
		if err != nil {
			return nil, fmt.Errorf("pki: %s: %w", FileCANext, err)
		}
		return ca, nil
	}
	cert, err := DecodeCert(b.CACert)
	if err != nil {
		return nil, fmt.Errorf("pki: reading the CA's certificate: %w", err)
	}
	if !cert.IsCA {
		return nil, fmt.Errorf("pki: %s holds a certificate that is no CA", FileCACert)
	}
	key, err := decodeKey(b.CAKey)
	if err != nil {
		return nil, fmt.Errorf("pki: reading the CA's key: %w", err)
	}
	if !key.PublicKey.Equal(cert.PublicKey) {
		return nil, fmt.Errorf("pki: %s and %s do not belong together", FileCACert, FileCAKey)
	}
	return &CA{Cert: cert, key: key}, nil
}

// Pool returns a certificate pool that contains only the signing CA.
func (t *Trust) Pool() *x509.CertPool { return t.CA.Pool() }
