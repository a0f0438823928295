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
	// ErrForged: the record of a join token was not written by the control plane of this cluster.
	ErrForged = errors.New("the record of the token is not of this cluster's making")
	// ErrUsedUp: as many have joined with the token as may.
	ErrUsedUp = errors.New("the token has been used as often as it may")
	// ErrWrongName: the token lets others join than the one that asks.
	ErrWrongName = errors.New("the token is for other names")
)

// Where and how a join token is kept in the API: never the secret, only its hash.
const (
	TokenNamespace    = metav1.NamespaceSystem
	TokenSecretPrefix = "bootstrap-token-"
	TokenSecretType   = corev1.SecretType("keelson.dev/join-token")

	tokenKeyID      = "token-id"
	tokenKeyHash    = "token-secret-sha256"
	tokenKeyExpires = "expiration"
	tokenKeyUsage   = "usage-" // + role = "true"
	tokenKeyNote    = "description"
	tokenKeyUses    = "uses"    // how often it may be used
	tokenKeyNames   = "names"   // who may join with it, comma-separated; absent = any name
	tokenKeyReplace = "replace" // "true": also under the name of a Node that exists
	tokenKeyUsed    = "used"    // how often it was
	tokenKeyUsers   = "used-by" // by whom, the last of them, a line each
	tokenKeyMAC     = "mac"     // over all the others
)

// usersKept is how many of those who joined with a token it names.
const usersKept = 64

// Grant is what a join token allows.
type Grant struct {
	Expires time.Time // required
	Uses    int       // how many may join; required
	Names   []string  // under which names; none = any
	Replace bool      // also under the name of a Node that exists
	Note    string
}

// TokenKey is the key by which a cluster knows its own records of join tokens.
type TokenKey []byte

// TokenKey derives the key from the secret of the cluster.
func (t *Trust) TokenKey() TokenKey {
	key, err := hkdf.Key(sha256.New, t.EncryptionKey, nil, "keelson join tokens", sha256.Size)
	if err != nil {
		panic(fmt.Sprintf("pki: deriving the key of join tokens: %v", err)) // only for keys longer than HKDF gives
	}
	return key
}

// SecretName is the name of the Secret that stands for the token.
func (t Token) SecretName() string { return TokenSecretPrefix + t.ID }

// Record builds the Secret that stands for a token.
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

// mac covers the name of a record and everything in it, each with its length.
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

// TokenExpires is when the token has expired for which a Secret stands; false for one that stands for none, or does not
// say.
func TokenExpires(s *corev1.Secret) (time.Time, bool) {
	if s == nil || s.Type != TokenSecretType {
		return time.Time{}, false
	}
	at, err := time.Parse(time.RFC3339, string(s.Data[tokenKeyExpires]))
	return at, err == nil
}

// Check says what the Secret of the cluster lets the bearer of the token do who
// asks to join as name: or an error wrapping ErrMalformed (the Secret is no join
// token), ErrForged, ErrWrongSecret, ErrWrongRole, ErrExpired or ErrWrongName.
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

// Use is Check, and takes down that user, a single line, joins: the result is the record to be
// stored in the place of the one that was read. It is nil for one who has joined with this token
// already and did not hear the answer. ErrUsedUp, when nobody may any more.
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

// secretHash needs no salt or stretching: the secret is random, not a password.
func (t Token) secretHash() string {
	sum := sha256.Sum256([]byte(t.Secret))
	return hex.EncodeToString(sum[:])
}
