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

	"keelson.dev/keelson/internal/durable"
)

// The functions in this file change the keys and CAs in a replica's folder during the rotation of a
// cluster key. Each is idempotent. After a crash at any point, Load can read the folder, and keys
// that were trusted before are still trusted.

// maxSealedKeyBytes is the maximum size of a key that Seal encrypts, in bytes. A CA certificate and
// its key have about 1,200 bytes.
const maxSealedKeyBytes = 16 << 10

// ErrNotOurs is returned by Unseal for data that cannot be decrypted with this cluster's secret.
var ErrNotOurs = errors.New("pki: the data was encrypted by another cluster, or is damaged")

// Seal encrypts key, a new key of the cluster, with the cluster's secret. The replicas of the
// cluster read the result from the store during a rotation, and only they can decrypt it. context
// states the purpose of the key; Unseal requires the same context.
func (t *Trust) Seal(context string, key []byte) ([]byte, error) {
	if len(key) > maxSealedKeyBytes {
		return nil, fmt.Errorf("pki: encrypting a key of %d bytes: at most %d are allowed", len(key), maxSealedKeyBytes)
	}
	aead, err := t.exchangeAEAD()
	if err != nil {
		return nil, err
	}
	nonce := make([]byte, aead.NonceSize())
	rand.Read(nonce) // never fails
	return aead.Seal(nonce, nonce, key, []byte(context)), nil
}

// Unseal decrypts the result of Seal. It returns ErrNotOurs if the data was encrypted with another
// secret or context.
func (t *Trust) Unseal(context string, sealed []byte) ([]byte, error) {
	aead, err := t.exchangeAEAD()
	if err != nil {
		return nil, err
	}
	n := aead.NonceSize()
	if len(sealed) < n || len(sealed) > maxSealedKeyBytes+64 {
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

// PeerID returns the ID of a peer CA, as 'peer-ca list' and 'kctl cluster certs' print it.
func PeerID(c *x509.Certificate) string { return SPKIHash(c)[:16] }

// NewPeerKey creates a CA for the connections between replicas. It returns the CA's certificate and
// private key in PEM, and the CA's ID.
func NewPeerKey(clusterName string, now time.Time) (text []byte, id string, err error) {
	ca, err := NewCA(clusterName+"-peers", now)
	if err != nil {
		return nil, "", err
	}
	text, err = ca.encodeCertAndKey()
	return text, PeerID(ca.Cert), err
}

// AddTrustedPeerCA adds a peer CA to the trusted peer CAs in the folder dir. text contains the CA's
// certificate and key, as returned by NewPeerKey.
func AddTrustedPeerCA(dir string, text []byte) error {
	t, ca, err := loadTrustAndCA(dir, text)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(t.PeerAuthorities(), ca.Cert.Equal) {
		return nil
	}
	return t.writePeerCAs(dir, append(t.PeerTrusted, ca.Cert))
}

// SetSigningPeerCA makes a peer CA the signer of this replica's peer certificates, in the folder
// dir. text contains the CA's certificate and key. The previous peer CA remains trusted.
func SetSigningPeerCA(dir string, text []byte) error {
	t, ca, err := loadTrustAndCA(dir, text)
	if err != nil {
		return err
	}
	if t.peerCA().Cert.Equal(ca.Cert) {
		return nil
	}
	// This list is written first, so that the previous CA is trusted at all times.
	if err := t.writePeerCAs(dir, append(t.PeerTrusted, t.peerCA().Cert)); err != nil {
		return err
	}
	return WriteFile(filepath.Join(dir, FilePeers), text)
}

// RemoveTrustedPeerCA removes the peer CA with the given ID from the trusted peer CAs in the folder
// dir. It does not remove the CA that signs this replica's certificates.
func RemoveTrustedPeerCA(dir, id string) error {
	t, err := Load(dir)
	if err != nil {
		return err
	}
	left := slices.DeleteFunc(slices.Clone(t.PeerTrusted), func(c *x509.Certificate) bool {
		return PeerID(c) == id || t.peerCA().Cert.Equal(c) // the signing CA is trusted even if it is not in the list
	})
	if len(left) == len(t.PeerTrusted) {
		return nil
	}
	return writeOrRemove(filepath.Join(dir, FilePeersTrusted), encodeCerts(left))
}

func loadTrustAndCA(dir string, text []byte) (*Trust, *CA, error) {
	t, err := Load(dir)
	if err != nil {
		return nil, nil, err
	}
	ca, err := decodeCertAndKey(text)
	return t, ca, err
}

// NewServiceKey creates a key that signs service account tokens. It returns the key in PEM and its
// ID.
func NewServiceKey() (text []byte, id string, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, "", fmt.Errorf("pki: creating the service account key: %w", err)
	}
	if text, err = encodeKey(key); err != nil {
		return nil, "", err
	}
	id, err = keyID(&key.PublicKey)
	return text, id, err
}

// AddServiceKey adds a key to the trusted service account keys in the folder dir: tokens that are
// signed with it are accepted. text is the private key in PEM, as returned by NewServiceKey.
func AddServiceKey(dir string, text []byte) error {
	t, key, err := loadTrustAndKey(dir, text)
	if err != nil || key.Equal(t.ServiceKey) {
		return err
	}
	return t.writeServiceKeys(dir, append(t.ServiceTrusted, &key.PublicKey))
}

// SetSigningServiceKey makes a key the signer of service account tokens, in the folder dir. text is
// the private key in PEM. Tokens that are signed with the previous key remain valid.
func SetSigningServiceKey(dir string, text []byte) error {
	t, key, err := loadTrustAndKey(dir, text)
	if err != nil || key.Equal(t.ServiceKey) {
		return err
	}
	if err := t.writeServiceKeys(dir, append(t.ServiceTrusted, &t.ServiceKey.PublicKey, &key.PublicKey)); err != nil {
		return err
	}
	return WriteFile(filepath.Join(dir, FileServiceKey), text)
}

// RemoveServiceKey removes the key with the given ID from the trusted service account keys in the
// folder dir. The key that signs tokens always remains trusted.
func RemoveServiceKey(dir, id string) error {
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
	return t.writeServiceKeys(dir, left)
}

func (t *Trust) writeServiceKeys(dir string, keys []*ecdsa.PublicKey) error {
	text, err := encodePublic(keys)
	if err != nil {
		return err
	}
	return writeOrRemove(filepath.Join(dir, FileServiceTrusted), text)
}

func loadTrustAndKey(dir string, text []byte) (*Trust, *ecdsa.PrivateKey, error) {
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

// writeOrRemove writes text to the file path. If text is empty, it removes the file.
func writeOrRemove(path string, text []byte) error {
	if len(text) > 0 {
		return WriteFile(path, text)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("pki: %w", err)
	}
	return durable.Sync(filepath.Dir(path))
}
