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

// Files of a trust folder. All are mode 0600 in a folder of mode 0700.
const (
	FileCACert     = "ca.crt"
	FileCAKey      = "ca.key"
	FileServiceKey = "sa.key"
	// FileServiceTrusted is there while the service account key is exchanged.
	FileServiceTrusted = "sa-trusted.pem" // public keys
	FileEncryptionKey  = "encryption.key"
	// FileStoreKeys may be absent: a cluster whose stores are not encrypted, or
	// whose operator keeps the key file elsewhere.
	FileStoreKeys = "store.keys"
)

// ErrExists: the folder already holds something, so no trust was written to it.
var ErrExists = errors.New("pki: the folder is not empty")

// EncryptionKeySize is the length of the secret that all replicas share, in bytes.
const EncryptionKeySize = 32

// Trust is everything secret that the replicas of one cluster share. It is
// immutable and safe for concurrent use.
type Trust struct {
	CA *CA
	// ServiceKey signs service account tokens.
	ServiceKey *ecdsa.PrivateKey
	// ServiceTrusted are further keys whose tokens are believed.
	ServiceTrusted []*ecdsa.PublicKey
	// EncryptionKey is the secret from which the cluster derives its symmetric keys; EncryptionKeySize bytes.
	EncryptionKey []byte
	// StoreKeys is the key file under which the replicas encrypt their stores, as
	// raftstore/disk reads it; nil where none exists. A joining replica receives it.
	StoreKeys []byte

	// PeerCA signs the replicas' peer certificates in the place of CA; may be nil.
	// PeerTrusted are further authorities that replicas believe of each other.
	PeerCA      *CA
	PeerTrusted []*x509.Certificate

	// CATrusted are authorities that are believed beside CA while it is exchanged. CAFormer, which is among them, signs the
	// certificate of the API until everybody has heard of CA; nil otherwise.
	CATrusted []*x509.Certificate
	CAFormer  *CA
}

// ClusterName is the name given at Init; the CA's certificate carries it.
func (t *Trust) ClusterName() string {
	return strings.TrimPrefix(t.CA.Cert.Subject.CommonName, caNamePrefix)
}

// NewTrust makes the trust of a new cluster in memory.
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
	rand.Read(enc) // never fails: crypto/rand ends the process where the kernel has no randomness
	return &Trust{CA: ca, ServiceKey: key, EncryptionKey: enc}, nil
}

// Init makes the trust of a new cluster and writes it to dir, whole or not at
// all. It never overwrites: a dir that holds any file is ErrExists.
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

// Save writes the trust to dir under Init's rules: how a joining replica keeps
// what it has received.
func (t *Trust) Save(dir string) (err error) {
	b, err := t.bundle()
	if err != nil {
		return err
	}
	dir = filepath.Clean(dir)
	// The folder that the trust is in is its daemon's alone; what is above it may be anybody's.
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
	// rename(2) replaces an empty folder and refuses one with contents, in one
	// step: neither a crash nor a second Init can leave half of two clusters.
	switch err := syscall.Rename(tmp, dir); {
	case errors.Is(err, syscall.ENOTEMPTY), errors.Is(err, syscall.EEXIST):
		return fmt.Errorf("pki: writing the cluster's keys to %s: %w", dir, ErrExists)
	case err != nil:
		return fmt.Errorf("pki: moving the cluster's keys to %s: %w", dir, err)
	}
	return syncDir(filepath.Dir(dir))
}

// Load reads the trust that Init or Save wrote to dir. A folder without it
// gives an error that wraps fs.ErrNotExist.
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

// Marshal packs the trust for a joining replica. The result is as secret as the
// keys inside: it goes over a pinned TLS connection and nowhere else.
func (t *Trust) Marshal() ([]byte, error) {
	b, err := t.bundle()
	if err != nil {
		return nil, err
	}
	return json.Marshal(b)
}

// UnmarshalTrust unpacks and checks what Marshal packed.
func UnmarshalTrust(data []byte) (*Trust, error) {
	var b bundle
	if err := json.Unmarshal(data, &b); err != nil {
		return nil, fmt.Errorf("pki: unpacking the cluster's keys: %w", err)
	}
	return b.trust()
}

// bundle is a trust as bytes: PEM, and the encryption key in hex.
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

// optional are the files that most trusts do without.
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

// Pool is a pool of one: the CA that signs.
func (t *Trust) Pool() *x509.CertPool { return t.CA.Pool() }
