// Package authn is stage 1 of the pipeline: it turns what a request proves about
// its sender into an api.User. Methods are asked in order and the first that
// recognises the sender wins; a sender who offers proof that no method accepts
// is refused, one who offers none is system:anonymous.
package authn

import (
	"context"
	"errors"
	"net/http"

	"keelson.dev/keelson/controlplane/api"
)

// Method recognises a request's sender by one kind of proof. ok is false when
// the request carries no such proof; err says why proof was offered and refused.
type Method interface {
	Authenticate(r *http.Request) (u api.User, ok bool, err error)
}

// ErrNobody says that a request carries no proof of identity at all.
var ErrNobody = errors.New("no credentials provided")

// Chain asks its methods in order.
type Chain []Method

// Authenticate returns the first user that a method recognises. When none does,
// the error joins the reasons of those that refused; without any proof at all it is ErrNobody.
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
	return api.User{}, ErrNobody
}

// Fault is what kept proof from being judged: a service that does not answer, say. Its text is for whoever asks, who
// may be anybody; Err is for the log.
type Fault struct {
	Public string
	Err    error
}

func (f *Fault) Error() string { return f.Public }
func (f *Fault) Unwrap() error { return f.Err }

// Anonymous is who a request without credentials is.
func Anonymous() api.User {
	return api.User{Name: api.UserAnonymous, Groups: []string{api.GroupUnauthenticated}}
}

// withGroup adds a group once.
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

// TokenVerifier recognises bearer tokens. ok is false when the token is of a
// kind that the verifier does not know; err says why a token of its kind is no good.
type TokenVerifier interface {
	VerifyToken(ctx context.Context, token string, audiences []string) (i TokenIdentity, ok bool, err error)
}

// TokenIdentity is what a good token says.
type TokenIdentity struct {
	User      api.User
	Audiences []string // those of the asked ones that the token is good for; nil when the kind of token has none
}
