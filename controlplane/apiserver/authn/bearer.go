package authn

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"keelson.dev/keelson/controlplane/api"
)

// Bearer recognises "Authorization: Bearer" tokens, and the websocket
// subprotocol in which browsers carry them, by its verifiers.
type Bearer struct{ Verifiers []TokenVerifier }

// websocketBearer is the subprotocol prefix that carries a base64url token.
const websocketBearer = "base64url.bearer.authorization.k8s.io."

// maxToken bounds a token, which in a header cannot be longer; in a TokenReview it could.
const maxToken = 48 << 10

// Authenticate is Method.
func (b Bearer) Authenticate(r *http.Request) (api.User, bool, error) {
	token := bearerToken(r)
	if token == "" {
		return api.User{}, false, nil
	}
	i, err := b.Review(r.Context(), token, nil)
	if err != nil {
		return api.User{}, false, err
	}
	return i.User, true, nil
}

// Review says whom a token names, for the audiences asked (none: those of this API).
func (b Bearer) Review(ctx context.Context, token string, audiences []string) (TokenIdentity, error) {
	if len(token) > maxToken {
		return TokenIdentity{}, fmt.Errorf("the token has %d bytes: %d at most are looked at", len(token), maxToken)
	}
	var refused []error
	for _, v := range b.Verifiers {
		i, ok, err := v.VerifyToken(ctx, token, audiences)
		switch {
		case err != nil:
			refused = append(refused, err)
		case ok:
			i.User = withGroup(i.User, api.GroupAuthenticated)
			return i, nil
		}
	}
	if len(refused) > 0 {
		return TokenIdentity{}, errors.Join(refused...)
	}
	return TokenIdentity{}, errors.New("invalid bearer token")
}

func bearerToken(r *http.Request) string {
	if scheme, token, ok := strings.Cut(strings.TrimSpace(r.Header.Get("Authorization")), " "); ok && strings.EqualFold(scheme, "bearer") {
		return strings.TrimSpace(token)
	}
	for _, header := range r.Header.Values("Sec-WebSocket-Protocol") {
		for p := range strings.SplitSeq(header, ",") {
			if enc, ok := strings.CutPrefix(strings.TrimSpace(p), websocketBearer); ok {
				if token, ok := decodeBase64URL(enc); ok {
					return token
				}
			}
		}
	}
	return ""
}

// Static recognises a fixed set of tokens. Only their hashes are kept, so that
// looking one up takes the same time however much of it is right.
type Static struct {
	users map[[sha256.Size]byte]api.User
}

// NewStatic recognises each key of tokens as its user.
func NewStatic(tokens map[string]api.User) *Static {
	s := &Static{users: make(map[[sha256.Size]byte]api.User, len(tokens))}
	for t, u := range tokens {
		s.users[sha256.Sum256([]byte(t))] = u
	}
	return s
}

// VerifyToken is TokenVerifier.
func (s *Static) VerifyToken(_ context.Context, token string, _ []string) (TokenIdentity, bool, error) {
	u, ok := s.users[sha256.Sum256([]byte(token))]
	return TokenIdentity{User: u}, ok, nil
}
