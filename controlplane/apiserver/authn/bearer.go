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

// Bearer authenticates requests by a bearer token. The first of Verifiers that is responsible for
// the token verifies it. The token is in the "Authorization: Bearer" header or, from browsers, in a
// websocket subprotocol.
type Bearer struct{ Verifiers []TokenVerifier }

// websocketBearer is the prefix of the websocket subprotocol that contains a bearer token. The
// token, encoded as base64url, follows the prefix.
const websocketBearer = "base64url.bearer.authorization.k8s.io."

// maxToken is the maximum size of a token in bytes. Request headers are limited to this size
// anyway, but the token in a TokenReview is not.
const maxToken = 48 << 10

// Authenticate verifies the bearer token of the request, if it has one, for the audiences of this
// API.
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

// Review verifies a token for the requested audiences and returns its identity. If audiences is
// empty, the audiences of this API are used.
func (b Bearer) Review(ctx context.Context, token string, audiences []string) (TokenIdentity, error) {
	if len(token) > maxToken {
		return TokenIdentity{}, fmt.Errorf("the token has %d bytes, the maximum is %d", len(token), maxToken)
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
	if scheme, token, ok := strings.Cut(strings.TrimSpace(r.Header.Get("Authorization")), " "); ok &&
		strings.EqualFold(scheme, "bearer") {
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

// Static authenticates a fixed set of tokens. It stores only hashes of the tokens, so that the
// duration of a lookup does not depend on how much of a token is correct.
type Static struct {
	users map[[sha256.Size]byte]api.User
}

// NewStatic returns a Static for tokens, which maps each token to its user.
func NewStatic(tokens map[string]api.User) *Static {
	s := &Static{users: make(map[[sha256.Size]byte]api.User, len(tokens))}
	for t, u := range tokens {
		s.users[sha256.Sum256([]byte(t))] = u
	}
	return s
}

// VerifyToken returns the user of the token; ok is false for an unknown token.
func (s *Static) VerifyToken(_ context.Context, token string, _ []string) (TokenIdentity, bool, error) {
	u, ok := s.users[sha256.Sum256([]byte(token))]
	return TokenIdentity{User: u}, ok, nil
}
