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
	// ErrForged is the error for a join token Secret that this cluster's control plane did not
	// write.
	ErrForged = errors.New("the record of the token is not of this cluster's making")
	// ErrUsedUp is the error when the token has been used as often as it may.
	ErrUsedUp = errors.New("the token has been used as often as it may")
	// ErrWrongName is the error when the token does not allow joining with the requested name.
	ErrWrongName = errors.New("the token is for other names")
)

// Name, type and keys of the Secret that stores a join token. It contains only a hash of the
// token's secret.
const (
	TokenNamespace    = metav1.NamespaceSystem
	TokenSecretPrefix = "bootstrap-token-"
	TokenSecretType   = corev1.SecretType("keelson.dev/join-token")

	tokenKeyID      = "token-id"
	tokenKeyHash    = "token-secret-sha256"
	tokenKeyExpires = "expiration"
	tokenKeyUsage   = "usage-" // + role = "true"
	tokenKeyNote    = "description"
	tokenKeyUses    = "uses"    // number of allowed uses
	tokenKeyNames   = "names"   // names with which machines may join, comma-separated; absent = any name
	tokenKeyReplace = "replace" // "true": also with the name of an existing Node
	tokenKeyUsed    = "used"    // number of uses so far
	tokenKeyUsers   = "used-by" // the last users that joined, one per line
	tokenKeyMAC     = "mac"     // MAC of all other entries
)

// usersKept is how many of the users that joined with a token its Secret lists.
const usersKept = 64

// Grant contains the permissions of a join token.
type Grant struct {
	Expires time.Time // required
	Uses    int       // number of allowed uses; required
	Names   []string  // names with which machines may join; empty = any
	Replace bool      // also with the name of an existing Node
	Note    string
}

// TokenKey is the key of the MAC by which a cluster verifies its own join token Secrets.
type TokenKey []byte

// TokenKey derives the key from the cluster's secret.
func (t *Trust) TokenKey() TokenKey {
	key, err := hkdf.Key(sha256.New, t.EncryptionKey, nil, "keelson join tokens", sha256.Size)
	if err != nil {
		panic(fmt.Sprintf("pki: deriving the key of join tokens: %v", err)) // only for keys longer than the maximum of HKDF
	}
	return key
}

// SecretName returns the name of the Secret that stores the token.
func (t Token) SecretName() string { return TokenSecretPrefix + t.ID }

// Record returns the Secret that stores a token with the permissions g.
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
	s.Data[tokenKeyMAC] = k.mac(s)
	return s
}

// mac returns the MAC of the Secret's namespace, name and data, each prefixed by its length.
func (k TokenKey) mac(s *corev1.Secret) []byte {
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

// TokenExpires returns when the token of a join token Secret expires; false for other Secrets, or
// if the time cannot be read.
func TokenExpires(s *corev1.Secret) (time.Time, bool) {
	if s == nil || s.Type != TokenSecretType {
		return time.Time{}, false
	}
	at, err := time.Parse(time.RFC3339, string(s.Data[tokenKeyExpires]))
	return at, err == nil
}

// Check returns the permissions of token t according to its Secret record, for a machine that wants
// to join as name. Otherwise the error wraps ErrMalformed (record is not the Secret of t),
// ErrForged, ErrWrongSecret, ErrWrongRole, ErrExpired or ErrWrongName.
func (k TokenKey) Check(t Token, record *corev1.Secret, name string, now time.Time) (Grant, error) {
	refuse := func(why error) (Grant, error) { return Grant{}, fmt.Errorf("pki: join token %q: %w", t.ID, why) }
	if record == nil || record.Type != TokenSecretType || string(record.Data[tokenKeyID]) != t.ID {
		return refuse(fmt.Errorf("%w: Secret %s/%s does not stand for it", ErrMalformed, TokenNamespace, t.SecretName()))
	}
	if !hmac.Equal(record.Data[tokenKeyMAC], k.mac(record)) {
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

// Use checks a token like Check and records that user joins with it. It returns the Secret to be
// stored in place of record. The result is nil if user has joined with this token before, which a
// client without a response may repeat. It returns ErrUsedUp if the token allows no further use.
// user must be a single line.
func (k TokenKey) Use(t Token, record *corev1.Secret, name, user string, now time.Time) (*corev1.Secret, error) {
	g, err := k.Check(t, record, name, now)
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
	out.Data[tokenKeyMAC] = k.mac(out)
	return out, nil
}

// secretHash returns the SHA-256 hash of the secret. It needs neither salt nor stretching, since
// the secret is random.
func (t Token) secretHash() string {
	sum := sha256.Sum256([]byte(t.Secret))
	return hex.EncodeToString(sum[:])
}
