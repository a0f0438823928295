package nodegateway

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/controlplane/api"
)

// Asked is one who asks to be let into the cluster, or to stay there, for the record of it.
type Asked struct {
	Method      string   // of the service, with its path
	User        api.User // who has proved to be that
	Verb        string
	Group       string // of the resource
	Resource    string
	Subresource string
	Name        string // as what it wants to be let in; a client's word
	Token       string // the id of the join token that was shown, good or not; "" = none
	Source      string
	Received    time.Time
}

// Answered is what came of it. Reason says more than the caller is told; it may be empty.
type Answered struct {
	Err    error
	Reason string
}

// UserOfToken is who shows a good join token.
func UserOfToken(id string) api.User { return api.User{Name: "keelson:join-token:" + id} }

// entry is the record of one request in the making.
type entry struct {
	audit  func(Asked) (func(Answered), error)
	asked  Asked
	answer func(Answered)
	reason string
}

// asks begins the record of a request; it is one of nobody until known is called.
func (s *Server) asks(ctx context.Context, a Asked) *entry {
	if s.cfg.Audit == nil {
		return &entry{}
	}
	a.User = api.User{Name: api.UserAnonymous, Groups: []string{api.GroupUnauthenticated}}
	a.Received = time.Now()
	if source := sourceOf(ctx); source.IsValid() {
		a.Source = source.String()
	}
	return &entry{audit: s.cfg.Audit, asked: a}
}

// nodeAsked and replicaAsked are the enrolments.
func nodeAsked(method, name string) Asked {
	return Asked{Method: method, Verb: string(api.VerbCreate), Resource: "nodes", Subresource: "enrollment", Name: name}
}

func replicaAsked(method, name string) Asked {
	return Asked{Method: method, Verb: string(api.VerbCreate), Group: "keelson.dev", Resource: "replicas",
		Subresource: "enrollment", Name: name}
}

// renewalAsked is that a node asks for another certificate.
func renewalAsked(method, node string) Asked {
	return Asked{Method: method, Verb: string(api.VerbUpdate), Resource: "nodes", Subresource: "certificate", Name: node}
}

// servingAsked is that a node asks for a certificate for its own HTTPS server.
func servingAsked(method, node string) Asked {
	return Asked{Method: method, Verb: string(api.VerbUpdate), Resource: "nodes", Subresource: "servingcertificate", Name: node}
}

// known says who asks. An error means that it has to be recorded, and cannot be.
func (r *entry) known(u api.User) error {
	r.asked.User = u
	return r.begin()
}

func (r *entry) begin() error {
	if r.audit == nil || r.answer != nil {
		return nil
	}
	answer, err := r.audit(r.asked)
	if err != nil {
		return status.Errorf(codes.Unavailable, "fleet: the request was not performed, because it cannot be recorded: %v",
			err)
	}
	r.answer = answer
	return nil
}

// done ends the record.
func (r *entry) done(err error) {
	if r.begin() == nil && r.answer != nil {
		r.answer(Answered{Err: err, Reason: r.reason})
	}
}
