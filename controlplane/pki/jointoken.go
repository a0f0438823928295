package pki

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"
)

// The reasons why join tokens and service account tokens are rejected. Every error of a function
// that checks tokens wraps one of these errors, or one of those in tokenrecord.go.
var (
	ErrMalformed   = errors.New("the token is malformed")
	ErrExpired     = errors.New("the token has expired")
	ErrNotYetValid = errors.New("the token is not valid yet")
	ErrAudience    = errors.New("the token is for another audience")
	ErrSignature   = errors.New("the token is not signed by this cluster")
	ErrIssuer      = errors.New("the token is from another issuer")
	ErrWrongSecret = errors.New("the token's secret is wrong")
	ErrWrongRole   = errors.New("the token is for another role")
	// ErrWrongCA is returned if the server that a joining machine contacts does not belong to the
	// cluster of the join token.
	ErrWrongCA = errors.New("the server's certificate is not issued by the CA in the token")
)

// Role is the kind of machine, node or replica, that a join token admits.
type Role string

// The roles of a join token.
const (
	RoleNode         Role = "node"
	RoleControlPlane Role = "controlplane"
)

const (
	tokenVersion = "keelson1"
	tokenIDLen   = 6
	tokenKeyLen  = 26 // of 36 characters: 134 bits

	tokenAlphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
)

// Token is a join token: keelson1.<role>.<id>.<secret>.<hash of the CA's key>. It authorizes a
// machine to join the cluster. By the hash, the machine verifies that a server belongs to that
// cluster.
type Token struct {
	Role   Role
	ID     string
	Secret string
	CAHash string // SPKIHash of the CA
}

// NewToken generates a join token for the cluster with the CA certificate ca.
func NewToken(role Role, ca *x509.Certificate) Token {
	return Token{Role: role, ID: randomText(tokenIDLen), Secret: randomText(tokenKeyLen), CAHash: SPKIHash(ca)}
}

// ParseToken parses a join token. If s does not have exactly the format of Token.String, it returns
// ErrMalformed. The error never contains the secret.
func ParseToken(s string) (Token, error) {
	bad := func(why string) (Token, error) {
		return Token{}, fmt.Errorf("pki: join token: %w: %s", ErrMalformed, why)
	}
	parts := strings.Split(s, ".")
	if len(parts) != 5 {
		return bad(fmt.Sprintf("it has %d parts, want 5 (%s.role.id.secret.hash)", len(parts), tokenVersion))
	}
	t := Token{Role: Role(parts[1]), ID: parts[2], Secret: parts[3], CAHash: parts[4]}
	switch {
	case parts[0] != tokenVersion:
		return bad(fmt.Sprintf("it does not start with %q", tokenVersion+"."))
	case t.Role != RoleNode && t.Role != RoleControlPlane:
		return bad(fmt.Sprintf("the role is neither %q nor %q", RoleNode, RoleControlPlane))
	case len(t.ID) != tokenIDLen || strings.Trim(t.ID, tokenAlphabet) != "":
		return bad(fmt.Sprintf("the id is not %d lower-case letters and digits", tokenIDLen))
	case len(t.Secret) != tokenKeyLen || strings.Trim(t.Secret, tokenAlphabet) != "":
		return bad(fmt.Sprintf("the secret is not %d lower-case letters and digits", tokenKeyLen))
	case len(t.CAHash) != 2*sha256.Size || strings.Trim(t.CAHash, "0123456789abcdef") != "":
		return bad("the CA's hash is not a SHA-256 in lower-case hex digits")
	}
	return t, nil
}

// String returns the token including its secret.
func (t Token) String() string {
	return strings.Join([]string{tokenVersion, string(t.Role), t.ID, t.Secret, t.CAHash}, ".")
}

// LogValue returns the token without its secret.
func (t Token) LogValue() slog.Value {
	return slog.GroupValue(slog.String("role", string(t.Role)), slog.String("id", t.ID))
}

// PinnedTLS returns the TLS configuration for a machine that has only a join token. It accepts a
// server at any address if its certificate chain ends in the CA of the token. Otherwise the
// handshake fails with ErrWrongCA. receiveCA, which may be nil, is called with the CA before any
// data is exchanged. now must not be nil.
func PinnedTLS(t Token, receiveCA func(ca *x509.Certificate), now func() time.Time) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: CAHint(t.CAHash),
		Time:       now,
		// Verification by crypto/tls requires the CA in advance. VerifyConnection replaces it.
		InsecureSkipVerify: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			ca, err := checkPinned(t, cs.PeerCertificates, now())
			if err != nil {
				return fmt.Errorf("pki: join token %q: %w", t.ID, err)
			}
			if receiveCA != nil {
				receiveCA(ca)
			}
			return nil
		},
	}
}

func checkPinned(t Token, chain []*x509.Certificate, now time.Time) (*x509.Certificate, error) {
	for i, ca := range chain {
		if i == 0 || subtle.ConstantTimeCompare([]byte(SPKIHash(ca)), []byte(t.CAHash)) != 1 {
			continue
		}
		roots := x509.NewCertPool()
		roots.AddCert(ca)
		_, err := chain[0].Verify(x509.VerifyOptions{
			Roots: roots, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		})
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrWrongCA, err)
		}
		return ca, nil
	}
	return nil, fmt.Errorf("%w (sha256 %s)", ErrWrongCA, t.CAHash)
}

func randomText(n int) string {
	out := make([]byte, 0, n)
	b := make([]byte, 1)
	// 252 is the largest multiple of 36 in a byte. Without this limit the first characters would be
	// more likely than the others.
	for len(out) < n {
		if rand.Read(b); b[0] < 252 {
			out = append(out, tokenAlphabet[int(b[0])%len(tokenAlphabet)])
		}
	}
	return string(out)
}
