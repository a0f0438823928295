package accept

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/controlplane/api"
)

// AuditRequest describes a request to join the cluster or to renew a certificate, for the audit
// log.
type AuditRequest struct {
	Method      string   // full gRPC method name, including the service
	User        api.User // the authenticated user; anonymous until authentication has succeeded
	Verb        string
	Group       string // API group of Resource
	Resource    string
	Subresource string
	Name        string // name of the node or replica in the request, which may be false
	Token       string // ID of the join token in the request, valid or not; empty if there is none
	Source      string
	Received    time.Time
}

// AuditResult is the result of a request. Reason contains more details than the error that the
// caller receives. It may be empty.
type AuditResult struct {
	Err    error
	Reason string
}

// UserOfToken returns the user that the audit log records for the holder of the join token with an
// ID.
func UserOfToken(id string) api.User { return api.User{Name: "keelson:join-token:" + id} }

// auditEntry collects the audit record of one request while the request is handled.
type auditEntry struct {
	start    func(AuditRequest) (func(AuditResult), error)
	request  AuditRequest
	complete func(AuditResult)
	reason   string
}

// newAuditEntry returns the audit entry of a request. Its user is anonymous until setUser is
// called.
func (e *Enroller) newAuditEntry(ctx context.Context, request AuditRequest) *auditEntry {
	if e.cfg.Audit == nil {
		return &auditEntry{}
	}
	request.User = api.User{Name: api.UserAnonymous, Groups: []string{api.GroupUnauthenticated}}
	request.Received = time.Now()
	if source := callerSource(ctx); source.IsValid() {
		request.Source = source.String()
	}
	return &auditEntry{start: e.cfg.Audit, request: request}
}

// nodeEnrollmentRequest returns the audit attributes of the enrollment of a node with a name.
func nodeEnrollmentRequest(method, name string) AuditRequest {
	return AuditRequest{Method: method, Verb: string(api.VerbCreate), Resource: "nodes", Subresource: "enrollment",
		Name: name}
}

func replicaEnrollmentRequest(method, name string) AuditRequest {
	return AuditRequest{Method: method, Verb: string(api.VerbCreate), Group: "keelson.dev", Resource: "replicas",
		Subresource: "enrollment", Name: name}
}

// renewalRequest returns the audit attributes of a node's request for a new client certificate.
func renewalRequest(method, node string) AuditRequest {
	return AuditRequest{Method: method, Verb: string(api.VerbUpdate), Resource: "nodes", Subresource: "certificate",
		Name: node}
}

// servingRequest returns the audit attributes of a node's request for a serving certificate.
func servingRequest(method, node string) AuditRequest {
	return AuditRequest{Method: method, Verb: string(api.VerbUpdate), Resource: "nodes",
		Subresource: "servingcertificate", Name: node}
}

// setUser sets the authenticated user and starts the audit event. It returns an error if the event
// must be recorded and cannot be recorded.
func (a *auditEntry) setUser(u api.User) error {
	a.request.User = u
	return a.startEvent()
}

func (a *auditEntry) startEvent() error {
	if a.start == nil || a.complete != nil {
		return nil
	}
	complete, err := a.start(a.request)
	if err != nil {
		return status.Errorf(codes.Unavailable,
			"fleet: the request was not performed, because it cannot be recorded: %v",
			err)
	}
	a.complete = complete
	return nil
}

// completeEvent completes the audit event with the result err. If setUser was not called, it first
// starts the event.
func (a *auditEntry) completeEvent(err error) {
	if a.startEvent() == nil && a.complete != nil {
		a.complete(AuditResult{Err: err, Reason: a.reason})
	}
}
