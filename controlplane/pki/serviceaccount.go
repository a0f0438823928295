package pki

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"keelson.dev/keelson/controlplane/api"
)

// DefaultIssuer is the issuer of service account tokens, and the audience of tokens requested
// without one.
const DefaultIssuer = "https://kubernetes.default.svc.cluster.local"

// tokenLeeway is the accepted clock difference between two replicas.
const tokenLeeway = 10 * time.Second

// Ref identifies an object to which a token is bound. The token becomes invalid when the object is
// deleted.
type Ref struct {
	Name string `json:"name"`
	UID  string `json:"uid"`
}

// Claims are the claims of a service account token.
type Claims struct {
	Issuer    string
	Audiences []string
	ID        string // jti; set by Sign
	IssuedAt  time.Time
	NotBefore time.Time
	Expiry    time.Time

	Namespace      string
	ServiceAccount Ref
	Pod            *Ref // nil = not bound to a pod
	Node           *Ref // the node of the pod
	Secret         *Ref // nil = not bound to a Secret
}

// User returns the user that the token authenticates.
func (c *Claims) User() api.User {
	u := api.User{
		Name: api.ServiceAccountPrefix + c.Namespace + ":" + c.ServiceAccount.Name,
		UID:  c.ServiceAccount.UID,
		Groups: []string{api.GroupServiceAccounts, api.GroupServiceAccounts + ":" + c.Namespace,
			api.GroupAuthenticated},
		Extra: map[string][]string{},
	}
	add := func(key, value string) { u.Extra["authentication.kubernetes.io/"+key] = []string{value} }
	if c.ID != "" {
		add("credential-id", "JTI="+c.ID)
	}
	if c.Pod != nil {
		add("pod-name", c.Pod.Name)
		add("pod-uid", c.Pod.UID)
	}
	if c.Node != nil {
		add("node-name", c.Node.Name)
		add("node-uid", c.Node.UID)
	}
	return u
}

// wireClaims is the JSON form of Claims in the token.
type wireClaims struct {
	jwt.Claims
	Kubernetes struct {
		Namespace      string `json:"namespace"`
		ServiceAccount Ref    `json:"serviceaccount"`
		Pod            *Ref   `json:"pod,omitempty"`
		Node           *Ref   `json:"node,omitempty"`
		Secret         *Ref   `json:"secret,omitempty"`
	} `json:"kubernetes.io"`
}

// ServiceTokens signs and verifies service account tokens (ES256). Exchange can replace its keys at
// any time. It is safe for concurrent use.
type ServiceTokens struct {
	issuer string
	keys   atomic.Pointer[serviceKeys]
}

// serviceKeys are immutable.
type serviceKeys struct {
	id     string // of the signing key
	signer jose.Signer
	all    map[string]*ecdsa.PublicKey // by key ID
}

// NewServiceTokens returns a ServiceTokens that signs with key and accepts tokens of key and of the
// old keys.
func NewServiceTokens(issuer string, key *ecdsa.PrivateKey, old ...*ecdsa.PublicKey) (*ServiceTokens, error) {
	t := &ServiceTokens{issuer: issuer}
	return t, t.Exchange(key, old...)
}

// Exchange replaces the keys: tokens are signed with key, and tokens of key and the others are
// accepted. After an error nothing has changed.
func (t *ServiceTokens) Exchange(key *ecdsa.PrivateKey, others ...*ecdsa.PublicKey) error {
	k := &serviceKeys{all: map[string]*ecdsa.PublicKey{}}
	for i, pub := range append([]*ecdsa.PublicKey{&key.PublicKey}, others...) {
		kid, err := keyID(pub)
		if err != nil {
			return err
		}
		if i == 0 {
			k.id = kid
		}
		k.all[kid] = pub
	}
	var err error
	k.signer, err = jose.NewSigner(
		jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: key, KeyID: k.id}}, nil)
	if err != nil {
		return fmt.Errorf("pki: signing service account tokens: %w", err)
	}
	t.keys.Store(k)
	return nil
}

// KeyIDs returns the IDs of the signing key and of all keys with accepted tokens, as in tokens and
// the JWKS.
func (t *ServiceTokens) KeyIDs() (signs string, accepted []string) {
	k := t.keys.Load()
	return k.id, slices.Sorted(maps.Keys(k.all))
}

// Accepts reports whether tokens signed with the key of this ID are accepted.
func (t *ServiceTokens) Accepts(id string) bool { return t.keys.Load().all[id] != nil }

// KeyIDOf returns the key ID in a token's header without verifying the token; "" if the text is not
// a token.
func KeyIDOf(text string) string {
	token, err := jwt.ParseSigned(text, []jose.SignatureAlgorithm{jose.ES256})
	if err != nil || len(token.Headers) != 1 {
		return ""
	}
	return token.Headers[0].KeyID
}

// Issuer returns the "iss" claim of the tokens.
func (t *ServiceTokens) Issuer() string { return t.issuer }

// Sign signs a token with the audiences (default: the issuer), names and bindings of c, valid from
// now for life. It returns the token and its claims.
func (t *ServiceTokens) Sign(c Claims, life time.Duration, now time.Time) (string, *Claims, error) {
	now = now.Truncate(time.Second) // tokens have whole seconds
	c.Issuer, c.IssuedAt, c.NotBefore, c.Expiry = t.issuer, now, now, now.Add(life)
	c.ID = newJTI()
	if len(c.Audiences) == 0 {
		c.Audiences = []string{t.issuer}
	}
	var w wireClaims
	w.Issuer, w.Subject, w.ID = c.Issuer, api.ServiceAccountPrefix+c.Namespace+":"+c.ServiceAccount.Name, c.ID
	w.Audience = jwt.Audience(c.Audiences)
	w.IssuedAt, w.NotBefore, w.Expiry = jwt.NewNumericDate(c.IssuedAt), jwt.NewNumericDate(c.NotBefore), jwt.NewNumericDate(c.Expiry)
	k := &w.Kubernetes
	k.Namespace, k.ServiceAccount, k.Pod, k.Node, k.Secret = c.Namespace, c.ServiceAccount, c.Pod, c.Node, c.Secret
	text, err := jwt.Signed(t.keys.Load().signer).Claims(w).Serialize()
	if err != nil {
		return "", nil, fmt.Errorf("pki: signing a token of service account %s/%s: %w", c.Namespace, c.ServiceAccount.Name, err)
	}
	return text, &c, nil
}

// Verify checks a token's signature, issuer, times and audience, which must be one of audiences
// (default: the issuer). The caller must check that the account, pod or node to which the token is
// bound still exists. The error wraps ErrMalformed, ErrSignature, ErrIssuer, ErrAudience,
// ErrNotYetValid or ErrExpired and never contains the token.
func (t *ServiceTokens) Verify(text string, audiences []string, now time.Time) (*Claims, error) {
	c, err := t.verify(text, audiences, now)
	if err != nil {
		return nil, fmt.Errorf("pki: service account token: %w", err)
	}
	return c, nil
}

// open verifies a token's signature and decodes its claims.
func (t *ServiceTokens) open(text string, claims any) error {
	token, err := jwt.ParseSigned(text, []jose.SignatureAlgorithm{jose.ES256})
	if alg := (*jose.ErrUnexpectedSignatureAlgorithm)(nil); errors.As(err, &alg) {
		return ErrSignature
	}
	if err != nil || len(token.Headers) != 1 {
		// jose's error may quote the token, so it is not wrapped.
		return ErrMalformed
	}
	key := t.keys.Load().all[token.Headers[0].KeyID]
	if key == nil {
		return ErrSignature
	}
	if err := token.Claims(key, claims); err != nil {
		if errors.Is(err, jose.ErrCryptoFailure) {
			return ErrSignature
		}
		return fmt.Errorf("%w: its claims cannot be read", ErrMalformed)
	}
	return nil
}

func (t *ServiceTokens) verify(text string, audiences []string, now time.Time) (*Claims, error) {
	var w wireClaims
	if err := t.open(text, &w); err != nil {
		return nil, err
	}
	c, err := w.claims()
	if err != nil {
		return nil, err
	}
	if len(audiences) == 0 {
		audiences = []string{t.issuer}
	}
	switch {
	case c.Issuer != t.issuer:
		return nil, ErrIssuer
	case !slices.ContainsFunc(audiences, func(a string) bool { return slices.Contains(c.Audiences, a) }):
		return nil, ErrAudience
	case now.Before(c.NotBefore.Add(-tokenLeeway)):
		return nil, ErrNotYetValid
	case !now.Before(c.Expiry.Add(tokenLeeway)):
		return nil, ErrExpired
	}
	return c, nil
}

// claims converts the claims of a token with a valid signature. It returns ErrMalformed if required
// claims are missing or inconsistent.
func (w *wireClaims) claims() (*Claims, error) {
	k := &w.Kubernetes
	switch {
	case w.IssuedAt == nil || w.NotBefore == nil || w.Expiry == nil:
		return nil, fmt.Errorf("%w: it lacks iat, nbf or exp", ErrMalformed)
	case k.Namespace == "" || k.ServiceAccount.Name == "" || k.ServiceAccount.UID == "":
		return nil, fmt.Errorf("%w: it names no service account", ErrMalformed)
	case w.Subject != api.ServiceAccountPrefix+k.Namespace+":"+k.ServiceAccount.Name:
		return nil, fmt.Errorf("%w: its subject is not the service account it names", ErrMalformed)
	}
	return &Claims{
		Issuer: w.Issuer, Audiences: w.Audience, ID: w.ID,
		IssuedAt: w.IssuedAt.Time(), NotBefore: w.NotBefore.Time(), Expiry: w.Expiry.Time(),
		Namespace: k.Namespace, ServiceAccount: k.ServiceAccount, Pod: k.Pod, Node: k.Node, Secret: k.Secret,
	}, nil
}

// JWKS returns the document with the public keys of the tokens (/openid/v1/jwks).
func (t *ServiceTokens) JWKS() ([]byte, error) {
	var set jose.JSONWebKeySet
	for id, key := range t.keys.Load().all {
		set.Keys = append(set.Keys, jose.JSONWebKey{Key: key, KeyID: id, Algorithm: string(jose.ES256), Use: "sig"})
	}
	slices.SortFunc(set.Keys, func(a, b jose.JSONWebKey) int {
		if a.KeyID < b.KeyID {
			return -1
		}
		return 1
	})
	return json.Marshal(set)
}

// OpenIDConfiguration returns the discovery document (/.well-known/openid-configuration).
func (t *ServiceTokens) OpenIDConfiguration(jwksURI string) ([]byte, error) {
	return json.Marshal(map[string]any{
		"issuer":                                t.issuer,
		"jwks_uri":                              jwksURI,
		"response_types_supported":              []string{"id_token"},
		"subject_types_supported":               []string{"public"},
		"id_token_signing_alg_values_supported": []string{string(jose.ES256)},
	})
}

func keyID(pub *ecdsa.PublicKey) (string, error) {
	der, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil {
		return "", fmt.Errorf("pki: naming a service account key: %w", err)
	}
	sum := sha256.Sum256(der)
	return base64.RawURLEncoding.EncodeToString(sum[:]), nil
}

// newJTI returns a random UUID (version 4).
func newJTI() string {
	var b [16]byte
	rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	h := hex.EncodeToString(b[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}
