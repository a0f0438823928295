package pki

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// The functions in this file change a replica's trust folder during the rotation of a cluster key.
// Each is idempotent. After a crash at any point, Load can read the folder, and previously trusted
// keys are still trusted.

// exchangeSealSize is the maximum size of a sealed key in bytes; a CA takes about 1,200.
const exchangeSealSize = 16 << 10

// ErrNotOurs is the error for data that cannot be decrypted with this cluster's secret.
var ErrNotOurs = errors.New("pki: sealed by another cluster, or damaged")

// Seal encrypts a new key with the cluster's secret, so that only its replicas can read it from the
// store during a rotation. context is the purpose of the key; Unseal requires the same one.
func (t *Trust) Seal(context string, key []byte) ([]byte, error) {
	if len(key) > exchangeSealSize {
		return nil, fmt.Errorf("pki: sealing a key of %d bytes: at most %d", len(key), exchangeSealSize)
	}
	aead, err := t.exchangeAEAD()
	if err != nil {
		return nil, err
	}
	nonce := make([]byte, aead.NonceSize())
	rand.Read(nonce) // never fails
	return aead.Seal(nonce, nonce, key, []byte(context)), nil
}

// Unseal decrypts the result of Seal. It returns ErrNotOurs if the cluster's secret or the context
// differs.
func (t *Trust) Unseal(context string, sealed []byte) ([]byte, error) {
	aead, err := t.exchangeAEAD()
	if err != nil {
		return nil, err
	}
	n := aead.NonceSize()
	if len(sealed) < n || len(sealed) > exchangeSealSize+64 {
		return nil, ErrNotOurs
	}
	key, err := aead.Open(nil, sealed[:n], sealed[n:], []byte(context))
	if err != nil {
		return nil, ErrNotOurs
	}
	return key, nil
}

func (t *Trust) exchangeAEAD() (cipher.AEAD, error) {
	key, err := hkdf.Key(sha256.New, t.EncryptionKey, nil, "keelson exchange of keys", sha256.Size)
	if err != nil {
		return nil, fmt.Errorf("pki: deriving a key: %w", err)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

// PeerID returns the ID of a peer CA that 'peer-ca list' and 'kctl cluster certs' show.
func PeerID(c *x509.Certificate) string { return SPKIHash(c)[:16] }

// NewPeerKey creates a CA for connections between replicas and returns its certificate and key in
// PEM, and its ID.
func NewPeerKey(clusterName string, now time.Time) (text []byte, id string, err error) {
	ca, err := NewCA(clusterName+"-peers", now)
	if err != nil {
		return nil, "", err
	}
	text, err = ca.both()
	return text, PeerID(ca.Cert), err
}

// BelievePeer adds a peer CA to the trusted peer CAs in the trust folder dir. text contains its
// certificate and key, as returned by NewPeerKey.
func BelievePeer(dir string, text []byte) error {
	t, ca, err := loadWith(dir, text)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(t.PeerAuthorities(), ca.Cert.Equal) {
		return nil
	}
	return t.keepTrusted(dir, append(t.PeerTrusted, ca.Cert))
}

// SignPeer makes a peer CA sign this replica's peer certificates, in the trust folder dir. text
// contains its certificate and key. The previous peer CA remains trusted.
func SignPeer(dir string, text []byte) error {
	t, ca, err := loadWith(dir, text)
	if err != nil {
		return err
	}
	if t.peerCA().Cert.Equal(ca.Cert) {
		return nil
	}
	// This is written first, so that the previous CA is trusted at all times.
	if err := t.keepTrusted(dir, append(t.PeerTrusted, t.peerCA().Cert)); err != nil {
		return err
	}
	return WriteFile(filepath.Join(dir, FilePeers), text)
}

// DropPeer removes the peer CA with the given ID from the trusted peer CAs in the trust folder dir.
// The signing peer CA always remains trusted.
func DropPeer(dir, id string) error {
	t, err := Load(dir)
	if err != nil {
		return err
	}
	left := slices.DeleteFunc(slices.Clone(t.PeerTrusted), func(c *x509.Certificate) bool {
		return PeerID(c) == id || t.peerCA().Cert.Equal(c) // the signing CA is trusted without being in the list
	})
	if len(left) == len(t.PeerTrusted) {
		return nil
	}
	return writeOrRemove(filepath.Join(dir, FilePeersTrusted), encodeCerts(left))
}

func loadWith(dir string, text []byte) (*Trust, *CA, error) {
	t, err := Load(dir)
	if err != nil {
		return nil, nil, err
	}
	ca, err := readBoth(text)
	return t, ca, err
}

// NewServiceKey creates a key for signing service account tokens and returns it in PEM, with its
// ID.
func NewServiceKey() (text []byte, id string, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, "", fmt.Errorf("pki: making the service account key: %w", err)
	}
	if text, err = encodeKey(key); err != nil {
		return nil, "", err
	}
	id, err = keyID(&key.PublicKey)
	return text, id, err
}

// BelieveServiceKey makes service account tokens of a further key accepted, in the trust folder
// dir. text is the private key as returned by NewServiceKey.
func BelieveServiceKey(dir string, text []byte) error {
	t, key, err := loadService(dir, text)
	if err != nil || key.Equal(t.ServiceKey) {
		return err
	}
	return t.keepService(dir, append(t.ServiceTrusted, &key.PublicKey))
}

// SignServiceKey makes a key sign service account tokens, in the trust folder dir. text is the
// private key in PEM. Tokens of the previous key remain accepted.
func SignServiceKey(dir string, text []byte) error {
	t, key, err := loadService(dir, text)
	if err != nil || key.Equal(t.ServiceKey) {
		return err
	}
	if err := t.keepService(dir, append(t.ServiceTrusted, &t.ServiceKey.PublicKey, &key.PublicKey)); err != nil {
		return err
	}
	return WriteFile(filepath.Join(dir, FileServiceKey), text)
}

// DropServiceKey stops accepting service account tokens that the key with the given ID has signed,
// in the trust folder dir. Tokens of the signing key remain accepted.
func DropServiceKey(dir, id string) error {
	t, err := Load(dir)
	if err != nil {
		return err
	}
	left := slices.DeleteFunc(slices.Clone(t.ServiceTrusted), func(k *ecdsa.PublicKey) bool {
		name, err := keyID(k)
		return err == nil && name == id
	})
	if len(left) == len(t.ServiceTrusted) {
		return nil
	}
	if len(left) == 1 && left[0].Equal(&t.ServiceKey.PublicKey) {
		left = nil
	}
	return t.keepService(dir, left)
}

func (t *Trust) keepService(dir string, keys []*ecdsa.PublicKey) error {
	text, err := encodePublic(keys)
	if err != nil {
		return err
	}
	return writeOrRemove(filepath.Join(dir, FileServiceTrusted), text)
}

func loadService(dir string, text []byte) (*Trust, *ecdsa.PrivateKey, error) {
	t, err := Load(dir)
	if err != nil {
		return nil, nil, err
	}
	key, err := decodeKey(text)
	if err != nil {
		return nil, nil, fmt.Errorf("pki: a service account key: %w", err)
	}
	return t, key, nil
}

// writeOrRemove writes a file; with empty text it removes the file.
func writeOrRemove(path string, text []byte) error {
	if len(text) > 0 {
		return WriteFile(path, text)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("pki: %w", err)
	}
	return syncDir(filepath.Dir(path))
}
