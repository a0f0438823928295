package audit

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
)

// Attributes are the properties of a request that a policy matches and that audit events contain.
type Attributes struct {
	User   api.User // the user as which the request is performed
	Sender api.User // the authenticated user; differs from User when impersonating

	Verb        string // the verb of authorization; the lower-case HTTP method for a non-resource request
	Group       string
	Version     string
	Resource    string // "" = a non-resource request for Path
	Subresource string
	Namespace   string
	Name        string
	Path        string

	// Changes is true if the request is a write. Stream is true if its response is a watch or byte
	// stream.
	Changes, Stream bool
}

// Origin describes the source of a request.
type Origin struct {
	ID        string // audit ID sent by the client; "" = generate one
	URI       string
	Source    string // an IP address; "" for a caller in this process
	UserAgent string
	Received  time.Time
}

// Auditor creates the audit events that a policy requires and puts them into a sink. A nil Auditor
// records nothing.
type Auditor struct {
	policy *Policy
	sink   Sink
	clock  func() time.Time

	unauthenticated sourceLimiter
}

// Sink stores audit events as lines of JSON.
type Sink interface {
	// Put stores one line. An error means that the line is lost.
	Put(line []byte) error
}

// New returns an Auditor that puts events into s.
func New(policy *Policy, s Sink, clock func() time.Time) *Auditor {
	return &Auditor{policy: policy, sink: s, clock: clock}
}

// Record collects the audit data of one request. All methods of a nil Record except Annotate do
// nothing. The methods are safe for concurrent use: a panic and the response may be recorded by
// different goroutines.
type Record struct {
	auditor *Auditor
	origin  Origin

	mu            sync.Mutex
	id            string
	hasAttributes bool // the attributes are set and the policy has been evaluated
	attributes    Attributes
	verdict       verdict
	annotations   map[string]string
	status        *metav1.Status
	object        ObjectReference
	bodies        [2]json.RawMessage // of the request and of the response
	started       bool
	done          bool
}

// Begin starts the record of a request. The returned context contains the record (see Of).
func (a *Auditor) Begin(ctx context.Context, o Origin) (context.Context, *Record) {
	if a == nil {
		return ctx, nil
	}
	r := &Record{auditor: a, origin: o}
	return api.WithAnnotator(ctx, r), r
}

// Of returns the record of the request to which ctx belongs; nil if the request has none.
func Of(ctx context.Context) *Record {
	r, _ := api.AnnotatorOf(ctx).(*Record)
	return r
}

// Annotate sets an annotation of the record. A long value is truncated. Annotate does nothing if r
// is nil.
func (r *Record) Annotate(key, value string) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.annotations == nil {
		r.annotations = map[string]string{}
	}
	r.annotations[key] = clipText(value, maxAnnotation)
}

// AnnotateContent sets an annotation with content of the request as its value, if the policy
// records request bodies. It does nothing if r is nil.
func (r *Record) AnnotateContent(key, value string) {
	if r.WantsBody(false) {
		r.Annotate(key, value)
	}
}

// SetRequest sets the attributes of the request, evaluates the policy and puts the event of stage
// RequestReceived into the sink. An error means that a required event could not be stored.
func (r *Record) SetRequest(attributes Attributes) error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.setAttributes(attributes)
	return r.emitEvent(StageRequestReceived, 0)
}

// setAttributes sets the attributes and evaluates the policy. The lock must be held.
func (r *Record) setAttributes(attributes Attributes) {
	r.hasAttributes, r.attributes, r.verdict = true, attributes, r.auditor.policy.verdictFor(&attributes)
	r.object = ObjectReference{
		Resource: attributes.Resource, Namespace: attributes.Namespace, Name: attributes.Name,
		APIGroup: attributes.Group, APIVersion: attributes.Version, Subresource: attributes.Subresource,
	}
}

// ID returns the audit ID, for the response to the client.
func (r *Record) ID() string {
	if r == nil {
		return ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.objectName()
}

func (r *Record) objectName() string {
	if r.id == "" {
		if r.id = clipText(r.origin.ID, 64); r.id == "" {
			var b [16]byte
			_, _ = rand.Read(b[:]) // never fails
			h := hex.EncodeToString(b[:])
			r.id = h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
		}
	}
	return r.id
}

// WantsBody reports whether the policy records the response body (response=true) or the request
// body (response=false).
func (r *Record) WantsBody(response bool) bool {
	if r == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.verdict.level == LevelRequestResponse || !response && r.verdict.level == LevelRequest
}

// SetObject adds the object's name, namespace, UID and resourceVersion to the object reference of
// the record. Values that the URL contains are kept.
func (r *Record) SetObject(o metav1.Object) {
	if r == nil || o == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	fill := func(to *string, from string) {
		if *to == "" {
			*to = from
		}
	}
	fill(&r.object.Namespace, o.GetNamespace())
	fill(&r.object.Name, o.GetName())
	fill(&r.object.UID, string(o.GetUID()))
	fill(&r.object.ResourceVersion, o.GetResourceVersion())
}

// SetBody records the response body (response=true) or the request body, if the policy requires it
// and the body is not longer than maxBody. If parts of o may be encoded (see
// api.Kind.UnpackObject), kind must be the kind of o. Request bodies never have encoded parts.
func (r *Record) SetBody(response bool, o runtime.Object, kind *api.Kind) {
	if o == nil || !r.WantsBody(response) {
		return
	}
	data, whole := encodeForAudit(o, kind, r.verdict.omitManagedFields)
	r.SetRawBody(response, data, whole)
}

// SetRawBody records a body like SetBody, from the bytes of a JSON document. complete is false if
// the document is incomplete; then only the annotation audit.k8s.io/truncated is recorded.
func (r *Record) SetRawBody(response bool, data []byte, complete bool) {
	if !r.WantsBody(response) {
		return
	}
	if !complete || len(data) > maxBody {
		r.Annotate("audit.k8s.io/truncated", "true")
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	i := 0
	if response {
		i = 1
	}
	r.bodies[i] = data
}

// SetStatus sets the error status of the response, which contains the reason of the rejection.
func (r *Record) SetStatus(s *metav1.Status) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status = s
}

// MarkStarted puts the event of stage ResponseStarted into the sink, if the request is a watch or
// byte stream and code is not an error. Later calls do nothing.
func (r *Record) MarkStarted(code int) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.hasAttributes && r.attributes.Stream && !r.started && code < http.StatusBadRequest {
		r.started = true
		_ = r.emitEvent(StageResponseStarted, code)
	}
}

// Finish puts the last event of the request into the sink. Its stage is ResponseComplete, or Panic
// if the handler panicked. Later calls do nothing.
func (r *Record) Finish(code int, panicked bool) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done {
		return
	}
	r.done = true
	if !r.hasAttributes { // the request was rejected before its user was known
		r.setAttributes(Attributes{Path: r.origin.URI})
	}
	stage := StageResponseComplete
	if panicked {
		stage = StagePanic
	}
	_ = r.emitEvent(stage, code)
}

// emitEvent puts an event of the given stage into the sink, if the policy requires the event. code
// is
// 0 if there is no response yet. The lock must be held.
func (r *Record) emitEvent(stage Stage, code int) error {
	v := &r.verdict
	if v.level == LevelNone || slices.Contains(v.omit, stage) {
		return nil
	}
	if r.auditor.policy.changes && !r.attributes.Changes && code < http.StatusBadRequest && stage != StagePanic {
		return nil
	}
	// For RequestReceived of an unauthenticated client, it is not known yet whether the request
	// will be rejected.
	unsure := code >= http.StatusBadRequest || stage == StageRequestReceived
	if r.auditor.policy.changes && unsure &&
		(r.attributes.Sender.Name == "" || r.attributes.Sender.Name == api.UserAnonymous) {
		ok, skipped := r.auditor.unauthenticated.allowEvent(r.origin.Source, r.auditor.clock())
		if !ok {
			return nil
		}
		if skipped > 0 {
			if r.annotations == nil {
				r.annotations = map[string]string{}
			}
			r.annotations["audit.keelson.dev/refusals-before"] = strconv.Itoa(skipped)
		}
	}
	line, err := json.Marshal(r.newEvent(stage, code))
	if err != nil {
		return err
	}
	return r.auditor.sink.Put(append(line, '\n'))
}

func (r *Record) newEvent(stage Stage, code int) *Event {
	now := r.auditor.clock()
	e := &Event{
		Kind: "Event", APIVersion: groupVersion, Level: r.verdict.level, AuditID: r.objectName(), Stage: stage,
		RequestURI: clipText(r.origin.URI, maxURI), Verb: clipText(r.attributes.Verb, maxName),
		User: userInfo(r.attributes.Sender), UserAgent: clipText(r.origin.UserAgent, maxAgent),
		Received: metav1.NewMicroTime(r.origin.Received), Stamp: metav1.NewMicroTime(now), Annotations: r.annotations,
	}
	if r.attributes.User.Name != r.attributes.Sender.Name {
		u := userInfo(r.attributes.User)
		e.ImpersonatedUser = &u
	}
	if r.origin.Source != "" {
		e.SourceIPs = []string{r.origin.Source}
	}
	if o := r.object; o.Resource != "" {
		for _, s := range []*string{&o.Resource, &o.Namespace, &o.Name, &o.APIGroup, &o.APIVersion,
			&o.ResourceVersion, &o.Subresource} {
			*s = clipText(*s, maxName)
		}
		e.ObjectRef = &o
	}
	if code != 0 {
		e.ResponseStatus = responseStatus(r.status, code)
	}
	e.RequestObject, e.ResponseObject = r.bodies[0], r.bodies[1]
	return e
}

func responseStatus(refused *metav1.Status, code int) *metav1.Status {
	s := &metav1.Status{Code: int32(code)}
	if refused != nil && code >= http.StatusBadRequest {
		s.Status, s.Reason, s.Message = refused.Status, refused.Reason, clipText(refused.Message, maxMessage)
	}
	return s
}

func userInfo(u api.User) authenticationv1.UserInfo {
	out := authenticationv1.UserInfo{Username: clipText(u.Name, maxName), UID: clipText(u.UID, maxName),
		Groups: clipAll(u.Groups, maxGroups, maxName)}
	for k, values := range u.Extra {
		if out.Extra == nil {
			out.Extra = map[string]authenticationv1.ExtraValue{}
		}
		if len(out.Extra) == maxExtra {
			break
		}
		out.Extra[clipText(k, maxName)] = clipAll(values, maxExtra, maxName)
	}
	return out
}

// maxBody is the maximum size of a recorded body in bytes. Longer bodies are omitted.
const maxBody = 128 << 10

// encodeForAudit returns an object as JSON. Parts of the object may be encoded only if kind is its
// kind (see api.Kind.UnpackObject). whole is false if the JSON exceeds maxBody or if the object
// cannot be encoded.
func encodeForAudit(o runtime.Object, kind *api.Kind, omitManagedFields bool) (data []byte, whole bool) {
	if l, ok := o.(*api.ObjectList); ok {
		return encodeList(l, kind, omitManagedFields)
	}
	if light, ok := o.(api.Object); ok && kind != nil {
		var err error
		if o, err = kind.UnpackObject(light); err != nil {
			return nil, false
		}
	}
	if m, ok := o.(metav1.Object); ok && omitManagedFields && len(m.GetManagedFields()) > 0 {
		c := o.DeepCopyObject()
		c.(metav1.Object).SetManagedFields(nil)
		o = c
	}
	data, err := json.Marshal(o)
	return data, err == nil && len(data) <= maxBody
}

func encodeList(l *api.ObjectList, kind *api.Kind, omitManagedFields bool) ([]byte, bool) {
	out := []byte(`{"kind":"List","apiVersion":"v1","metadata":{"resourceVersion":` +
		strconv.Quote(l.ResourceVersion) + `},"items":[`)
	for i, o := range l.Items {
		data, whole := encodeForAudit(o, kind, omitManagedFields)
		if !whole || len(out)+len(data) > maxBody {
			return nil, false
		}
		if i > 0 {
			out = append(out, ',')
		}
		out = append(out, data...)
	}
	return append(out, "]}"...), true
}
