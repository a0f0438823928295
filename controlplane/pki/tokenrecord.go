package pki

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var (
	// ErrForged is returned for a join token Secret that this cluster's control plane did not
	// write.
	ErrForged = errors.New("the record of the token was not created by this cluster")
	// ErrUsedUp is returned if the join token was used as often as it allows.
	ErrUsedUp = errors.New("the token has no uses left")
	// ErrWrongName is returned if a machine may not join with its name, because the token is for
	// other names.
	ErrWrongName = errors.New("the token is for other names")
)

// Name prefix, type and data keys of the Secret that stores a join token. The Secret contains only
// a hash of the token's secret.
const (
	TokenNamespace    = metav1.NamespaceSystem
	TokenSecretPrefix = "bootstrap-token-"
	TokenSecretType   = corev1.SecretType("keelson.dev/join-token")

	tokenKeyID      = "token-id"
	tokenKeyHash    = "token-secret-sha256"
	tokenKeyExpires = "expiration"
	tokenKeyUsage   = "usage-" // followed by a role; "true" if the token is valid for that role
	tokenKeyNote    = "description"
	tokenKeyUses    = "uses"    // number of allowed uses
	tokenKeyNames   = "names"   // names with which machines may join, comma-separated; absent = any name
	tokenKeyReplace = "replace" // "true" if the machine may have the name of an existing Node
	tokenKeyUsed    = "used"    // number of uses so far
	tokenKeyUsers   = "used-by" // the user names of the last machines that joined, one per line
	tokenKeyMAC     = "mac"     // MAC of the namespace, the name and all other entries
)

// usersKept is the maximum number of users in the Secret of a join token: the last users that
// joined with the token.
const usersKept = 64

// Grant contains the permissions and the lifetime of a join token.
type Grant struct {
	Expires time.Time // required
	Uses    int       // number of allowed uses; required
	Names   []string  // names with which machines may join; empty = any
	Replace bool      // allows the name of an existing Node
	Note    string
}

// TokenKey is the key of the message authentication code (MAC) in join token Secrets. By the MAC, a
// cluster detects Secrets that its control plane did not write.
type TokenKey []byte

// TokenKey returns the key of the MAC in join token Secrets, which is derived from the cluster's
// secret.
func (t *Trust) TokenKey() TokenKey {
	key, err := hkdf.Key(sha256.New, t.EncryptionKey, nil, "keelson join tokens", sha256.Size)
	if err != nil {
		// only for keys that are longer than HKDF allows
		panic(fmt.Sprintf("pki: deriving the key of join tokens: %v", err))
	}
	return key
}

// SecretName returns the name of the Secret that stores the token.
func (t Token) SecretName() string { return TokenSecretPrefix + t.ID }

// Record returns the Secret that stores the token t with the permissions g.
func (k TokenKey) Record(t Token, g Grant) *corev1.Secret {
	s := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: TokenNamespace, Name: t.SecretName()},
		Type:       TokenSecretType,
		Data: map[string][]byte{
			tokenKeyID:                     []byte(t.ID),
			tokenKeyHash:                   []byte(t.secretHash()),
			tokenKeyUsage + string(t.Role): []byte("true"),
			tokenKeyExpires:                []byte(g.Expires.UTC().Format(time.RFC3339)),
			tokenKeyUses:                   []byte(strconv.Itoa(g.Uses)),
			tokenKeyUsed:                   []byte("0"),
		},
	}
	if len(g.Names) > 0 {
		s.Data[tokenKeyNames] = []byte(strings.Join(g.Names, ","))
	}
	if g.Replace {
		s.Data[tokenKeyReplace] = []byte("true")
	}
	if g.Note != "" {
		s.Data[tokenKeyNote] = []byte(g.Note)
	}
	s.Data[tokenKeyMAC] = k.computeMAC(s)
	return s
}

// computeMAC returns the MAC of the Secret's namespace, name and data. Each part is preceded by its
// length.
func (k TokenKey) computeMAC(s *corev1.Secret) []byte {
	h := hmac.New(sha256.New, k)
	put := func(b []byte) {
		fmt.Fprintf(h, "%d:", len(b))
		h.Write(b)
	}
	put([]byte(s.Namespace))
	put([]byte(s.Name))
	for _, key := range slices.Sorted(maps.Keys(s.Data)) {
		if key != tokenKeyMAC {
			put([]byte(key))
			put(s.Data[key])
		}
	}
	return []byte(hex.EncodeToString(h.Sum(nil)))
}

// TokenExpiry returns when the join token in the Secret s expires. It returns false if s is not a
// join token Secret, or if the time cannot be parsed.
func TokenExpiry(s *corev1.Secret) (time.Time, bool) {
	if s == nil || s.Type != TokenSecretType {
		return time.Time{}, false
	}
	at, err := time.Parse(time.RFC3339, string(s.Data[tokenKeyExpires]))
	return at, err == nil
}

// CheckToken returns the permissions of the join token t, which are stored in the Secret record.
// name is the name with which a machine wants to join. If the machine may not join, the error wraps
// ErrMalformed (record is not the Secret of t), ErrForged, ErrWrongSecret, ErrWrongRole, ErrExpired
// or ErrWrongName.
func (k TokenKey) CheckToken(t Token, record *corev1.Secret, name string, now time.Time) (Grant, error) {
	refuse := func(why error) (Grant, error) { return Grant{}, fmt.Errorf("pki: join token %q: %w", t.ID, why) }
	if record == nil || record.Type != TokenSecretType || string(record.Data[tokenKeyID]) != t.ID {
		return refuse(fmt.Errorf("%w: Secret %s/%s is the record of another token", ErrMalformed, TokenNamespace,
			t.SecretName()))
	}
	if !hmac.Equal(record.Data[tokenKeyMAC], k.computeMAC(record)) {
		return refuse(ErrForged)
	}
	if subtle.ConstantTimeCompare(record.Data[tokenKeyHash], []byte(t.secretHash())) != 1 {
		return refuse(ErrWrongSecret)
	}
	if string(record.Data[tokenKeyUsage+string(t.Role)]) != "true" {
		return refuse(fmt.Errorf("%w than %q", ErrWrongRole, t.Role))
	}
	g := Grant{Replace: string(record.Data[tokenKeyReplace]) == "true", Note: string(record.Data[tokenKeyNote])}
	var err, err2 error
	g.Expires, err = time.Parse(time.RFC3339, string(record.Data[tokenKeyExpires]))
	g.Uses, err2 = strconv.Atoi(string(record.Data[tokenKeyUses]))
	if err := errors.Join(err, err2); err != nil {
		return refuse(fmt.Errorf("%w: %w", ErrMalformed, err))
	}
	if !now.Before(g.Expires) {
		return refuse(fmt.Errorf("%w at %s", ErrExpired, g.Expires.Format(time.RFC3339)))
	}
	if names := string(record.Data[tokenKeyNames]); names != "" {
		g.Names = strings.Split(names, ",")
		if !slices.Contains(g.Names, name) {
			return refuse(fmt.Errorf("%w than %q", ErrWrongName, name))
		}
	}
	return g, nil
}

// UseToken is like CheckToken, and records that user joins with the token. It returns the Secret
// that replaces record. The result is nil if user has already joined with this token, because a
// client that received no response may repeat the request. UseToken returns ErrUsedUp if the token
// has no uses left. user must not contain white space.
func (k TokenKey) UseToken(t Token, record *corev1.Secret, name, user string, now time.Time) (*corev1.Secret, error) {
	g, err := k.CheckToken(t, record, name, now)
	if err != nil {
		return nil, err
	}
	users := strings.Fields(string(record.Data[tokenKeyUsers]))
	if slices.Contains(users, user) {
		return nil, nil
	}
	used, err := strconv.Atoi(string(record.Data[tokenKeyUsed]))
	if err != nil {
		return nil, fmt.Errorf("pki: join token %q: %w: %w", t.ID, ErrMalformed, err)
	}
	if used >= g.Uses {
		return nil, fmt.Errorf("pki: join token %q: %w: %d times", t.ID, ErrUsedUp, used)
	}
	out := record.DeepCopy()
	users = append(users, user)
	out.Data[tokenKeyUsers] = []byte(strings.Join(users[max(0, len(users)-usersKept):], "\n"))
	out.Data[tokenKeyUsed] = []byte(strconv.Itoa(used + 1))
	out.Data[tokenKeyMAC] = k.computeMAC(out)
	return out, nil
}

// secretHash returns the SHA-256 hash of the token's secret. Because the secret is random, the hash
// needs neither salt nor key stretching.
func (t Token) secretHash() string {
	sum := sha256.Sum256([]byte(t.Secret))
	return hex.EncodeToString(sum[:])
}

// Limits and defaults of join tokens.
const (
	MaxTokenUses     = 10000
	NodeTokenLife    = 24 * time.Hour // default lifetime
	ReplicaTokenLife = time.Hour      // default lifetime
)
