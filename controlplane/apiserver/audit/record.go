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

// Attributes are the properties of a request that a policy matches and that its record contains.
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

// Auditor creates records by a policy and puts them into a sink. A nil Auditor records nothing.
type Auditor struct {
	policy *Policy
	sink   Sink
	clock  func() time.Time

	strangers strangers
}

// Sink stores audit events.
type Sink interface {
	// Put stores one line. An error means that the line is lost.
	Put(line []byte) error
}

// New returns an Auditor that puts events into s.
func New(p *Policy, s Sink, clock func() time.Time) *Auditor {
	return &Auditor{policy: p, sink: s, clock: clock}
}

// Record collects the audit data of one request. All methods of a nil Record do nothing. The
// methods are safe for concurrent use: a panic and its response may come from another goroutine.
type Record struct {
	a      *Auditor
	origin Origin

	mu      sync.Mutex
	id      string
	known   bool // the attributes are set and the policy has been evaluated
	at      Attributes
	verdict verdict
	notes   map[string]string
	status  *metav1.Status
	object  ObjectReference
	bodies  [2]json.RawMessage // of the request and of the response
	started bool
	done    bool
}

// Begin starts the record of a request. Of finds it in the returned context.
func (a *Auditor) Begin(ctx context.Context, o Origin) (context.Context, *Record) {
	if a == nil {
		return ctx, nil
	}
	r := &Record{a: a, origin: o}
	return api.WithAnnotator(ctx, r), r
}

// Of returns the record of the request of ctx; nil when none exists.
func Of(ctx context.Context) *Record {
	r, _ := api.AnnotatorOf(ctx).(*Record)
	return r
}

// Annotate sets an annotation of the record. A long value is truncated.
func (r *Record) Annotate(key, value string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.notes == nil {
		r.notes = map[string]string{}
	}
	r.notes[key] = clip(value, longNote)
}

// AnnotateContent sets an annotation with content of the request, if the policy records request
// bodies.
func (r *Record) AnnotateContent(key, value string) {
	if r.Wants(false) {
		r.Annotate(key, value)
	}
}

// Asked sets the attributes of the request, evaluates the policy and puts the event
// RequestReceived. An error means that a required event could not be stored.
func (r *Record) Asked(at Attributes) error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.judge(at)
	return r.emit(StageRequestReceived, 0)
}

// judge sets the attributes and evaluates the policy. The lock must be held.
func (r *Record) judge(at Attributes) {
	r.known, r.at, r.verdict = true, at, r.a.policy.of(&at)
	r.object = ObjectReference{
		Resource: at.Resource, Namespace: at.Namespace, Name: at.Name, APIGroup: at.Group, APIVersion: at.Version, Subresource: at.Subresource,
	}
}

// ID returns the audit ID, for the response to the client.
func (r *Record) ID() string {
	if r == nil {
		return ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.name()
}

func (r *Record) name() string {
	if r.id == "" {
		if r.id = clip(r.origin.ID, 64); r.id == "" {
			var b [16]byte
			_, _ = rand.Read(b[:]) // never fails
			h := hex.EncodeToString(b[:])
			r.id = h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
		}
	}
	return r.id
}

// Wants reports whether the response body is to be recorded, or with answer=false, whether the
// request body is.
func (r *Record) Wants(answer bool) bool {
	if r == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.verdict.level == LevelRequestResponse || !answer && r.verdict.level == LevelRequest
}

// Object completes the object reference with the object's name, namespace, UID and resourceVersion,
// where the URL lacks them.
func (r *Record) Object(o metav1.Object) {
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

// Body records the response body, or with answer=false the request body, if the policy wants it and
// it is not too long. If o may be in the light form of a kind (see api.Kind.Whole), of must be this
// kind. A request body is never in light form.
func (r *Record) Body(answer bool, o runtime.Object, of *api.Kind) {
	if o == nil || !r.Wants(answer) {
		return
	}
	data, whole := encode(o, of, r.verdict.omitManagedFields)
	r.Raw(answer, data, whole)
}

// Raw records a body like Body, from the bytes of a JSON document. whole is false if the document
// is incomplete; then only its truncation is recorded.
func (r *Record) Raw(answer bool, data []byte, whole bool) {
	if !r.Wants(answer) {
		return
	}
	if !whole || len(data) > longBody {
		r.Annotate("audit.k8s.io/truncated", "true")
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	i := 0
	if answer {
		i = 1
	}
	r.bodies[i] = data
}

// Refused sets the status with the reason why the request is rejected.
func (r *Record) Refused(s *metav1.Status) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status = s
}

// Started puts the event ResponseStarted of a watch or byte stream, once, unless code is an error.
func (r *Record) Started(code int) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.known && r.at.Stream && !r.started && code < http.StatusBadRequest {
		r.started = true
		_ = r.emit(StageResponseStarted, code)
	}
}

// Done puts the last event of the request: ResponseComplete, or Panic if the handler panicked.
// Later calls do nothing.
func (r *Record) Done(code int, panicked bool) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done {
		return
	}
	r.done = true
	if !r.known { // the request was rejected before its user was known
		r.judge(Attributes{Path: r.origin.URI})
	}
	stage := StageResponseComplete
	if panicked {
		stage = StagePanic
	}
	_ = r.emit(stage, code)
}

// emit puts an event into the sink, if the policy wants it. code is 0 before there is a response.
// The lock must be held.
func (r *Record) emit(stage Stage, code int) error {
	v := &r.verdict
	if v.level == LevelNone || slices.Contains(v.omit, stage) {
		return nil
	}
	if r.a.policy.changes && !r.at.Changes && code < http.StatusBadRequest && stage != StagePanic {
		return nil
	}
	// For RequestReceived of an unauthenticated client, it is not known yet whether the request
	// will be rejected.
	unsure := code >= http.StatusBadRequest || stage == StageRequestReceived
	if r.a.policy.changes && unsure && (r.at.Sender.Name == "" || r.at.Sender.Name == api.UserAnonymous) {
		ok, skipped := r.a.strangers.admit(r.origin.Source, r.a.clock())
		if !ok {
			return nil
		}
		if skipped > 0 {
			if r.notes == nil {
				r.notes = map[string]string{}
			}
			r.notes["audit.keelson.dev/refusals-before"] = strconv.Itoa(skipped)
		}
	}
	line, err := json.Marshal(r.event(stage, code))
	if err != nil {
		return err
	}
	return r.a.sink.Put(append(line, '\n'))
}

func (r *Record) event(stage Stage, code int) *Event {
	now := r.a.clock()
	e := &Event{
		Kind: "Event", APIVersion: groupVersion, Level: r.verdict.level, AuditID: r.name(), Stage: stage,
		RequestURI: clip(r.origin.URI, longURI), Verb: clip(r.at.Verb, longName),
		User: userInfo(r.at.Sender), UserAgent: clip(r.origin.UserAgent, longAgent),
		Received: metav1.NewMicroTime(r.origin.Received), Stamp: metav1.NewMicroTime(now), Annotations: r.notes,
	}
	if r.at.User.Name != r.at.Sender.Name {
		u := userInfo(r.at.User)
		e.ImpersonatedUser = &u
	}
	if r.origin.Source != "" {
		e.SourceIPs = []string{r.origin.Source}
	}
	if o := r.object; o.Resource != "" {
		for _, s := range []*string{&o.Resource, &o.Namespace, &o.Name, &o.APIGroup, &o.APIVersion,
			&o.ResourceVersion, &o.Subresource} {
			*s = clip(*s, longName)
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
		s.Status, s.Reason, s.Message = refused.Status, refused.Reason, clip(refused.Message, longMessage)
	}
	return s
}

func userInfo(u api.User) authenticationv1.UserInfo {
	out := authenticationv1.UserInfo{Username: clip(u.Name, longName), UID: clip(u.UID, longName),
		Groups: clipAll(u.Groups, manyGroups, longName)}
	for k, values := range u.Extra {
		if out.Extra == nil {
			out.Extra = map[string]authenticationv1.ExtraValue{}
		}
		if len(out.Extra) == manyExtra {
			break
		}
		out.Extra[clip(k, longName)] = clipAll(values, manyExtra, longName)
	}
	return out
}

// longBody is the maximum size of a recorded body in bytes; longer bodies are omitted.
const longBody = 128 << 10

// encode returns an object as JSON. If of is not nil, the object may be in the light form of this
// kind (see api.Kind.Whole). whole is false if the JSON exceeds longBody or cannot be encoded.
func encode(o runtime.Object, of *api.Kind, omitManagedFields bool) (data []byte, whole bool) {
	if l, ok := o.(*api.ObjectList); ok {
		return encodeList(l, of, omitManagedFields)
	}
	if light, ok := o.(api.Object); ok && of != nil {
		var err error
		if o, err = of.Whole(light); err != nil {
			return nil, false
		}
	}
	if m, ok := o.(metav1.Object); ok && omitManagedFields && len(m.GetManagedFields()) > 0 {
		c := o.DeepCopyObject()
		c.(metav1.Object).SetManagedFields(nil)
		o = c
	}
	data, err := json.Marshal(o)
	return data, err == nil && len(data) <= longBody
}

func encodeList(l *api.ObjectList, of *api.Kind, omitManagedFields bool) ([]byte, bool) {
	out := []byte(`{"kind":"List","apiVersion":"v1","metadata":{"resourceVersion":` + strconv.Quote(l.ResourceVersion) + `},"items":[`)
	for i, o := range l.Items {
		data, whole := encode(o, of, omitManagedFields)
		if !whole || len(out)+len(data) > longBody {
			return nil, false
		}
		if i > 0 {
			out = append(out, ',')
		}
		out = append(out, data...)
	}
	return append(out, "]}"...), true
}
