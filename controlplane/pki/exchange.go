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

// What a replica does to its folder while a key of the cluster is exchanged for another. Each can be done again, and a
// crash at any point leaves a folder that Load reads and that believes what it believed before.

// exchangeSealSize bounds what is sealed: an authority takes some 1,200 bytes.
const exchangeSealSize = 16 << 10

// ErrNotOurs: what was sealed cannot be opened with the secret of this cluster.
var ErrNotOurs = errors.New("pki: sealed by another cluster, or damaged")

// Seal makes a new key readable for replicas of the cluster alone, so that it may lie in the store until all have it.
// context is what it is for: under another one it does not open.
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

// Unseal opens what Seal made; else ErrNotOurs.
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

// PeerID names an authority as 'peer-ca list' and 'kctl cluster certs' do.
func PeerID(c *x509.Certificate) string { return SPKIHash(c)[:16] }

// NewPeerKey makes an authority for connections between replicas: certificate, then key.
func NewPeerKey(clusterName string, now time.Time) (text []byte, id string, err error) {
	ca, err := NewCA(clusterName+"-peers", now)
	if err != nil {
		return nil, "", err
	}
	text, err = ca.both()
	return text, PeerID(ca.Cert), err
}

// BelievePeer makes the replica of a trust folder believe the authority too.
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

// SignPeer makes the authority sign this replica's certificates. The one before stays believed.
func SignPeer(dir string, text []byte) error {
	t, ca, err := loadWith(dir, text)
	if err != nil {
		return err
	}
	if t.peerCA().Cert.Equal(ca.Cert) {
		return nil
	}
	// First this: at no time is the former authority unknown.
	if err := t.keepTrusted(dir, append(t.PeerTrusted, t.peerCA().Cert)); err != nil {
		return err
	}
	return WriteFile(filepath.Join(dir, FilePeers), text)
}

// DropPeer ends the belief in one authority, unless it is the one that signs.
func DropPeer(dir, id string) error {
	t, err := Load(dir)
	if err != nil {
		return err
	}
	left := slices.DeleteFunc(slices.Clone(t.PeerTrusted), func(c *x509.Certificate) bool {
		return PeerID(c) == id || t.peerCA().Cert.Equal(c) // the one that signs is believed without being in the list
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

// NewServiceKey makes a key that signs tokens of service accounts.
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

// BelieveServiceKey has tokens of a further key believed by the replica of a trust folder.
func BelieveServiceKey(dir string, text []byte) error {
	t, key, err := loadService(dir, text)
	if err != nil || key.Equal(t.ServiceKey) {
		return err
	}
	return t.keepService(dir, append(t.ServiceTrusted, &key.PublicKey))
}

// SignServiceKey has the replica of a trust folder sign with a key. Tokens of the one before stay believed.
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

// DropServiceKey ends the belief in tokens of one key, and in those of the one that signs only when it does no more.
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

// writeOrRemove leaves no empty file.
func writeOrRemove(path string, text []byte) error {
	if len(text) > 0 {
		return WriteFile(path, text)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("pki: %w", err)
	}
	return syncDir(filepath.Dir(path))
}
