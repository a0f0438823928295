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

	"keelson.dev/keelson/internal/durable"
)

// Files in the folder in which each replica stores the keys and CAs of its cluster. All have mode
// 0600; the folder has mode 0700.
const (
	FileCACert     = "ca.crt"
	FileCAKey      = "ca.key"
	FileServiceKey = "sa.key"
	// FileServiceTrusted exists only during a rotation of the service account key.
	FileServiceTrusted = "sa-trusted.pem" // public keys
	FileEncryptionKey  = "encryption.key"
	// FileStoreKeys contains the keys that encrypt the store. It does not exist if the stores are
	// not encrypted, or if the operator provides another key file.
	FileStoreKeys = "store.keys"
)

// ErrExists is returned by Init and Save if the folder is not empty. They then write no keys to it.
var ErrExists = errors.New("pki: the folder is not empty")

// EncryptionKeySize is the length of Trust.EncryptionKey, the secret that all replicas share, in
// bytes.
const EncryptionKeySize = 32

// Trust contains all keys, CAs and secrets that the replicas of one cluster share. It is immutable
// and safe for concurrent use.
type Trust struct {
	CA *CA
	// ServiceKey signs service account tokens.
	ServiceKey *ecdsa.PrivateKey
	// ServiceTrusted are other public keys: service account tokens that are signed with one of them
	// are accepted too.
	ServiceTrusted []*ecdsa.PublicKey
	// EncryptionKey is the cluster's secret, from which symmetric keys are derived. It has
	// EncryptionKeySize bytes.
	EncryptionKey []byte
	// StoreKeys is the content of the key file with which the replicas encrypt their stores, in the
	// format of raftstore/disk. It is nil if the folder has no key file. A joining replica receives
	// it.
	StoreKeys []byte

	// PeerCA signs the replicas' peer certificates, with which they authenticate to each other. If
	// it is nil, CA signs them. PeerTrusted are other CAs that replicas trust for peer
	// certificates.
	PeerCA      *CA
	PeerTrusted []*x509.Certificate

	// CATrusted are the CAs that are trusted in addition to CA during its rotation. CAFormer is one
	// of them: it signs API server certificates until all clients trust CA. CAFormer is nil when CA
	// signs them.
	CATrusted []*x509.Certificate
	CAFormer  *CA
}

// ClusterName returns the cluster name that was passed to Init. It is part of the CA's subject.
func (t *Trust) ClusterName() string {
	return strings.TrimPrefix(t.CA.Cert.Subject.CommonName, caNamePrefix)
}

// NewTrust generates the keys and the CA of a new cluster in memory.
func NewTrust(clusterName string, now time.Time) (*Trust, error) {
	ca, err := NewCA(clusterName, now)
	if err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("pki: creating the service account key: %w", err)
	}
	enc := make([]byte, EncryptionKeySize)
	rand.Read(enc) // never fails: if the kernel returns an error, crypto/rand ends the process
	return &Trust{CA: ca, ServiceKey: key, EncryptionKey: enc}, nil
}

// Init generates the keys and the CA of a new cluster, and writes them to the folder dir
// atomically. If dir is not empty, it writes nothing and returns ErrExists.
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

// Save writes all keys and CAs to the folder dir atomically, like Init. A joining replica stores
// those that it has received with Save.
func (t *Trust) Save(dir string) (err error) {
	b, err := t.toBundle()
	if err != nil {
		return err
	}
	dir = filepath.Clean(dir)
	// Only the daemon uses the parent folder. The folders above it may be shared.
	if err := os.MkdirAll(filepath.Dir(filepath.Dir(dir)), 0o755); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Dir(dir), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("pki: creating the parent folder of %s: %w", dir, err)
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), "."+filepath.Base(dir)+"-")
	if err != nil {
		return fmt.Errorf("pki: creating a temporary folder beside %s: %w", dir, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(tmp))
		}
	}()
	for name, data := range b.presentFiles() {
		if err := WriteFile(filepath.Join(tmp, name), data); err != nil {
			return err
		}
	}
	// rename(2) atomically replaces an empty folder and rejects a folder with files. Neither a
	// crash nor a concurrent Init can leave a mix of two clusters.
	switch err := syscall.Rename(tmp, dir); {
	case errors.Is(err, syscall.ENOTEMPTY), errors.Is(err, syscall.EEXIST):
		return fmt.Errorf("pki: writing the cluster's keys to %s: %w", dir, ErrExists)
	case err != nil:
		return fmt.Errorf("pki: moving the cluster's keys to %s: %w", dir, err)
	}
	return durable.Sync(filepath.Dir(dir))
}

// Load reads the keys and CAs that Init or Save wrote to the folder dir. If dir contains no keys,
// the error wraps fs.ErrNotExist.
func Load(dir string) (*Trust, error) {
	var b bundle
	for name, into := range b.requiredFiles() {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return nil, fmt.Errorf("pki: reading the cluster's keys: %w", err)
		}
		*into = data
	}
	for name, into := range b.optionalFiles() {
		data, err := readOptional(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		*into = data
	}
	t, err := b.toTrust()
	if err != nil {
		return nil, fmt.Errorf("%w (in %s)", err, dir)
	}
	return t, nil
}

// Marshal encodes all keys and CAs for a joining replica. The result is secret. It must only be
// sent over a TLS connection that is verified by the hash in a join token.
func (t *Trust) Marshal() ([]byte, error) {
	b, err := t.toBundle()
	if err != nil {
		return nil, err
	}
	return json.Marshal(b)
}

// UnmarshalTrust decodes and checks the result of Marshal.
func UnmarshalTrust(data []byte) (*Trust, error) {
	var b bundle
	if err := json.Unmarshal(data, &b); err != nil {
		return nil, fmt.Errorf("pki: decoding the cluster's keys: %w", err)
	}
	return b.toTrust()
}

// bundle is the encoded format of a Trust: certificates and keys in PEM, and the encryption key in
// hex.
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
	CANext    []byte `json:"-"` // contents of FileCANext
}

func (b *bundle) requiredFiles() map[string]*[]byte {
	return map[string]*[]byte{
		FileCACert: &b.CACert, FileCAKey: &b.CAKey,
		FileServiceKey: &b.ServiceKey, FileEncryptionKey: &b.EncryptionKey,
	}
}

// optionalFiles maps the names of the files that may be absent to the fields of b for their
// contents.
func (b *bundle) optionalFiles() map[string]*[]byte {
	return map[string]*[]byte{FilePeers: &b.Peers, FilePeersTrusted: &b.PeersTrusted, FileStoreKeys: &b.StoreKeys,
		FileServiceTrusted: &b.ServiceTrusted, FileCATrusted: &b.CATrusted, FileCAFormer: &b.CAFormer,
		FileCANext: &b.CANext}
}

func (b *bundle) presentFiles() map[string][]byte {
	out := map[string][]byte{}
	for name, p := range b.requiredFiles() {
		out[name] = *p
	}
	for name, p := range b.optionalFiles() {
		if len(*p) > 0 {
			out[name] = *p
		}
	}
	return out
}

func (t *Trust) toBundle() (*bundle, error) {
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
		if b.Peers, err = t.PeerCA.encodeCertAndKey(); err != nil {
			return nil, err
		}
	}
	b.CATrusted = encodeCerts(t.CATrusted)
	if t.CAFormer != nil {
		if b.CAFormer, err = t.CAFormer.encodeCertAndKey(); err != nil {
			return nil, err
		}
	}
	return b, nil
}

func (b *bundle) toTrust() (*Trust, error) {
	ca, err := b.decodeClusterCA()
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
		if t.PeerCA, err = decodeCertAndKey(b.Peers); err != nil {
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
		if t.CAFormer, err = decodeCertAndKey(b.CAFormer); err != nil {
			return nil, fmt.Errorf("pki: %s: %w", FileCAFormer, err)
		}
	}
	return t, nil
}

func (b *bundle) decodeClusterCA() (*CA, error) {
	if len(b.CANext) > 0 {
		ca, err := decodeCertAndKey(b.CANext)
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
		return nil, fmt.Errorf("pki: %s has a certificate that is not a CA certificate", FileCACert)
	}
	key, err := decodeKey(b.CAKey)
	if err != nil {
		return nil, fmt.Errorf("pki: reading the CA's key: %w", err)
	}
	if !key.PublicKey.Equal(cert.PublicKey) {
		return nil, fmt.Errorf("pki: the key in %[2]s does not match the certificate in %[1]s", FileCACert, FileCAKey)
	}
	return &CA{Cert: cert, key: key}, nil
}

// Pool returns a certificate pool that contains only the signing CA.
func (t *Trust) Pool() *x509.CertPool { return t.CA.Pool() }
