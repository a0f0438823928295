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

// DefaultIssuer is the default issuer of service account tokens. It is also the audience of tokens
// that are requested without an audience.
const DefaultIssuer = "https://kubernetes.default.svc.cluster.local"

// tokenLeeway is the accepted difference between the clocks of two replicas when the times in a
// token are checked.
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
	Pod            *Ref // nil if the token is not bound to a pod
	Node           *Ref // the node on which the pod runs
	Secret         *Ref // nil if the token is not bound to a Secret
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

// wireClaims is the JSON format of Claims in a token.
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

// ServiceTokens signs and verifies service account tokens (ES256). ReplaceKeys can replace its keys
// at any time. It is safe for concurrent use.
type ServiceTokens struct {
	issuer string
	keys   atomic.Pointer[serviceKeys]
}

// serviceKeys are the keys with which a ServiceTokens signs and verifies tokens. They are
// immutable.
type serviceKeys struct {
	id     string // ID of the signing key
	signer jose.Signer
	all    map[string]*ecdsa.PublicKey // the trusted public keys by their IDs
}

// NewServiceTokens returns a ServiceTokens that signs with key. It accepts tokens that are signed
// with key or with one of previousKeys.
func NewServiceTokens(issuer string, key *ecdsa.PrivateKey, previousKeys ...*ecdsa.PublicKey) (*ServiceTokens, error) {
	t := &ServiceTokens{issuer: issuer}
	return t, t.ReplaceKeys(key, previousKeys...)
}

// ReplaceKeys replaces the keys: new tokens are signed with key. Tokens that are signed with key or
// with one of otherKeys are accepted. After an error, the previous keys stay in use.
func (t *ServiceTokens) ReplaceKeys(key *ecdsa.PrivateKey, otherKeys ...*ecdsa.PublicKey) error {
	k := &serviceKeys{all: map[string]*ecdsa.PublicKey{}}
	for i, pub := range append([]*ecdsa.PublicKey{&key.PublicKey}, otherKeys...) {
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

// KeyIDs returns the ID of the signing key, and the IDs of all keys with which accepted tokens may
// be signed. Tokens and the JWKS contain these IDs.
func (t *ServiceTokens) KeyIDs() (signs string, accepted []string) {
	k := t.keys.Load()
	return k.id, slices.Sorted(maps.Keys(k.all))
}

// Accepts reports whether tokens are accepted that are signed with the key with the given ID.
func (t *ServiceTokens) Accepts(id string) bool { return t.keys.Load().all[id] != nil }

// ParseKeyID returns the key ID in the header of the token text. It does not verify the token. It
// returns "" if text is not a token.
func ParseKeyID(text string) string {
	token, err := jwt.ParseSigned(text, []jose.SignatureAlgorithm{jose.ES256})
	if err != nil || len(token.Headers) != 1 {
		return ""
	}
	return token.Headers[0].KeyID
}

// Issuer returns the issuer of the tokens, the value of their claim "iss".
func (t *ServiceTokens) Issuer() string { return t.issuer }

// Sign signs a service account token with the names, audiences and bindings in c. Without
// audiences, the audience is the issuer. The token is valid from now for the duration life. Sign
// returns the token and all its claims.
func (t *ServiceTokens) Sign(c Claims, life time.Duration, now time.Time) (string, *Claims, error) {
	now = now.Truncate(time.Second) // times in tokens are whole seconds
	c.Issuer, c.IssuedAt, c.NotBefore, c.Expiry = t.issuer, now, now, now.Add(life)
	c.ID = newJTI()
	if len(c.Audiences) == 0 {
		c.Audiences = []string{t.issuer}
	}
	var w wireClaims
	w.Issuer, w.Subject, w.ID = c.Issuer, api.ServiceAccountPrefix+c.Namespace+":"+c.ServiceAccount.Name, c.ID
	w.Audience = jwt.Audience(c.Audiences)
	w.IssuedAt, w.NotBefore, w.Expiry = jwt.NewNumericDate(c.IssuedAt), jwt.NewNumericDate(c.NotBefore),
		jwt.NewNumericDate(c.Expiry)
	k := &w.Kubernetes
	k.Namespace, k.ServiceAccount, k.Pod, k.Node, k.Secret = c.Namespace, c.ServiceAccount, c.Pod, c.Node, c.Secret
	text, err := jwt.Signed(t.keys.Load().signer).Claims(w).Serialize()
	if err != nil {
		return "", nil, fmt.Errorf("pki: signing a token of service account %s/%s: %w", c.Namespace,
			c.ServiceAccount.Name, err)
	}
	return text, &c, nil
}

// Verify checks a token's signature, issuer, times and audience, and returns its claims. The
// audience must be one of audiences; if audiences is empty, it must be the issuer. The caller must
// check that the account, pod or node to which the token is bound still exists. The error wraps
// ErrMalformed, ErrSignature, ErrIssuer, ErrAudience, ErrNotYetValid or ErrExpired and never
// contains the token.
func (t *ServiceTokens) Verify(text string, audiences []string, now time.Time) (*Claims, error) {
	c, err := t.verifyClaims(text, audiences, now)
	if err != nil {
		return nil, fmt.Errorf("pki: service account token: %w", err)
	}
	return c, nil
}

// decodeSigned verifies the signature of the token text, and decodes the claims of the token into
// the struct claims.
func (t *ServiceTokens) decodeSigned(text string, claims any) error {
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
		return fmt.Errorf("%w: its claims cannot be decoded", ErrMalformed)
	}
	return nil
}

func (t *ServiceTokens) verifyClaims(text string, audiences []string, now time.Time) (*Claims, error) {
	var w wireClaims
	if err := t.decodeSigned(text, &w); err != nil {
		return nil, err
	}
	c, err := w.toClaims()
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

// toClaims converts w, the claims of a token with a valid signature. It returns ErrMalformed if
// required claims are missing or inconsistent.
func (w *wireClaims) toClaims() (*Claims, error) {
	k := &w.Kubernetes
	switch {
	case w.IssuedAt == nil || w.NotBefore == nil || w.Expiry == nil:
		return nil, fmt.Errorf("%w: iat, nbf or exp is missing", ErrMalformed)
	case k.Namespace == "" || k.ServiceAccount.Name == "" || k.ServiceAccount.UID == "":
		return nil, fmt.Errorf("%w: the service account is missing", ErrMalformed)
	case w.Subject != api.ServiceAccountPrefix+k.Namespace+":"+k.ServiceAccount.Name:
		return nil, fmt.Errorf("%w: its subject differs from its service account", ErrMalformed)
	}
	return &Claims{
		Issuer: w.Issuer, Audiences: w.Audience, ID: w.ID,
		IssuedAt: w.IssuedAt.Time(), NotBefore: w.NotBefore.Time(), Expiry: w.Expiry.Time(),
		Namespace: k.Namespace, ServiceAccount: k.ServiceAccount, Pod: k.Pod, Node: k.Node, Secret: k.Secret,
	}, nil
}

// JWKS returns the JSON Web Key Set with the trusted public keys (/openid/v1/jwks).
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

// OpenIDConfiguration returns the OpenID discovery document (/.well-known/openid-configuration).
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
		return "", fmt.Errorf("pki: computing the ID of a service account key: %w", err)
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
