package nodegateway

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/controlplane/api"
)

// Asked describes a request to join the cluster or to renew a certificate, for the audit log.
type Asked struct {
	Method      string   // full gRPC method name, with the service's path
	User        api.User // the authenticated user; anonymous until authentication has succeeded
	Verb        string
	Group       string // API group of Resource
	Resource    string
	Subresource string
	Name        string // name of the node or replica that the client claims; not verified
	Token       string // ID of the join token in the request, valid or not; "" = no token
	Source      string
	Received    time.Time
}

// Answered is the result of a request. Reason is more detailed than the error that the caller gets;
// it may be empty.
type Answered struct {
	Err    error
	Reason string
}

// UserOfToken returns the user name under which the holder of a valid join token is audited.
func UserOfToken(id string) api.User { return api.User{Name: "keelson:join-token:" + id} }

// entry is the audit entry of one request while the request is handled.
type entry struct {
	audit  func(Asked) (func(Answered), error)
	asked  Asked
	answer func(Answered)
	reason string
}

// asks starts the audit entry of a request. The entry has the anonymous user until known is called.
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

// nodeAsked and replicaAsked return the audit attributes of an enrolment under the given name.
func nodeAsked(method, name string) Asked {
	return Asked{Method: method, Verb: string(api.VerbCreate), Resource: "nodes", Subresource: "enrollment", Name: name}
}

func replicaAsked(method, name string) Asked {
	return Asked{Method: method, Verb: string(api.VerbCreate), Group: "keelson.dev", Resource: "replicas",
		Subresource: "enrollment", Name: name}
}

// renewalAsked returns the audit attributes of a node's request for a new client certificate.
func renewalAsked(method, node string) Asked {
	return Asked{Method: method, Verb: string(api.VerbUpdate), Resource: "nodes", Subresource: "certificate", Name: node}
}

// servingAsked returns the audit attributes of a node's request for a serving certificate.
func servingAsked(method, node string) Asked {
	return Asked{Method: method, Verb: string(api.VerbUpdate), Resource: "nodes", Subresource: "servingcertificate", Name: node}
}

// known sets the authenticated user and starts the audit event. It returns an error if the event
// must be recorded and cannot be.
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

// done completes the audit event with the result err. It starts the event if known has not.
func (r *entry) done(err error) {
	if r.begin() == nil && r.answer != nil {
		r.answer(Answered{Err: err, Reason: r.reason})
	}
}
