// Package authn is stage 1 of the request pipeline: it derives an api.User from the credentials of
// a request. The methods run in order, and the first method that authenticates the client
// determines the user. A request with credentials that no method accepts is rejected. A request
// without credentials is system:anonymous.
package authn

import (
	"context"
	"errors"
	"net/http"

	"keelson.dev/keelson/controlplane/api"
)

// Method authenticates a request by one kind of credential. ok is false if the request has no such
// credential. err is the reason why the credential of the request is rejected.
type Method interface {
	Authenticate(r *http.Request) (u api.User, ok bool, err error)
}

// ErrNoCredentials is the error for a request that carries no credentials.
var ErrNoCredentials = errors.New("no credentials provided")

// Chain is a list of authentication methods that are tried in order.
type Chain []Method

// Authenticate returns the first user that a method authenticates, as a member of
// system:authenticated. If no method does, the error joins the errors of the methods that rejected
// a credential. It is ErrNoCredentials for a request without credentials.
func (c Chain) Authenticate(r *http.Request) (api.User, error) {
	var refused []error
	for _, m := range c {
		u, ok, err := m.Authenticate(r)
		switch {
		case err != nil:
			refused = append(refused, err)
		case ok:
			return withGroup(u, api.GroupAuthenticated), nil
		}
	}
	if len(refused) > 0 {
		return api.User{}, errors.Join(refused...)
	}
	return api.User{}, ErrNoCredentials
}

// Fault is an error that prevented the check of a credential, such as an unreachable webhook.
// Public is sent to the client, which may be unauthenticated. Err is only logged.
type Fault struct {
	Public string
	Err    error
}

func (f *Fault) Error() string { return f.Public }
func (f *Fault) Unwrap() error { return f.Err }

// Anonymous returns the user of a request without credentials.
func Anonymous() api.User {
	return api.User{Name: api.UserAnonymous, Groups: []string{api.GroupUnauthenticated}}
}

// withGroup returns u with the group added, unless u already has it.
func withGroup(u api.User, group string) api.User {
	for _, g := range u.Groups {
		if g == group {
			return u
		}
	}
	groups := make([]string, 0, len(u.Groups)+1)
	u.Groups = append(append(groups, u.Groups...), group)
	return u
}

// TokenVerifier authenticates bearer tokens. ok is false if the verifier is not responsible for
// this kind of token. err is the reason why a token of this kind is invalid.
type TokenVerifier interface {
	VerifyToken(ctx context.Context, token string, audiences []string) (i TokenIdentity, ok bool, err error)
}

// TokenIdentity is the result of verifying a valid token.
type TokenIdentity struct {
	User      api.User
	Audiences []string // the requested audiences for which the token is valid; nil if this kind of token has none
}
