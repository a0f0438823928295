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

// Attributes are what a policy judges a request by, and what its record says of it.
type Attributes struct {
	User   api.User // as whom
	Sender api.User // who has proved to be that; another than User when impersonating

	Verb        string // in the words of authorization; that of HTTP in small letters where there is no resource
	Group       string
	Version     string
	Resource    string // "" = a path
	Subresource string
	Namespace   string
	Name        string
	Path        string

	// Changes says that the request would change something. Stream says that its answer lasts.
	Changes, Stream bool
}

// Origin is where a request came from.
type Origin struct {
	ID        string // the client's own; "" = a new one
	URI       string
	Source    string // an IP address; "" for a caller in this process
	UserAgent string
	Received  time.Time
}

// Auditor makes records by a policy and puts them into a log. A nil Auditor records nothing.
type Auditor struct {
	policy *Policy
	sink   Sink
	clock  func() time.Time

	strangers strangers
}

// Sink takes events.
type Sink interface {
	// Put takes one line. An error says that it is lost.
	Put(line []byte) error
}

// New returns an auditor.
func New(p *Policy, s Sink, clock func() time.Time) *Auditor {
	return &Auditor{policy: p, sink: s, clock: clock}
}

// Record is the record of one request in the making. All methods of a nil Record do
// nothing. A panic and its answer may come from another goroutine than the rest.
type Record struct {
	a      *Auditor
	origin Origin

	mu      sync.Mutex
	id      string
	known   bool // who asks for what is known, and the policy has judged
	at      Attributes
	verdict verdict
	notes   map[string]string
	status  *metav1.Status
	object  ObjectReference
	bodies  [2]json.RawMessage // of the request and of the answer
	started bool
	done    bool
}

// Begin starts a record, found by Of in the context that it returns.
func (a *Auditor) Begin(ctx context.Context, o Origin) (context.Context, *Record) {
	if a == nil {
		return ctx, nil
	}
	r := &Record{a: a, origin: o}
	return api.WithAnnotator(ctx, r), r
}

// Of returns the record of the request that ctx belongs to; nil when none exists.
func Of(ctx context.Context) *Record {
	r, _ := api.AnnotatorOf(ctx).(*Record)
	return r
}

// Annotate is api.Annotator.
func (r *Record) Annotate(key, value string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.notes == nil {
		r.notes = map[string]string{}
	}
	r.notes[key] = clip(value, longNote)
}

// AnnotateContent is api.Annotator.
func (r *Record) AnnotateContent(key, value string) {
	if r.Wants(false) {
		r.Annotate(key, value)
	}
}

// Asked says who asks for what. An error means that the record could not be made and has to be.
func (r *Record) Asked(at Attributes) error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.judge(at)
	return r.emit(StageRequestReceived, 0)
}

// judge asks the policy. The lock is held.
func (r *Record) judge(at Attributes) {
	r.known, r.at, r.verdict = true, at, r.a.policy.of(&at)
	r.object = ObjectReference{
		Resource: at.Resource, Namespace: at.Namespace, Name: at.Name, APIGroup: at.Group, APIVersion: at.Version, Subresource: at.Subresource,
	}
}

// ID is the record's name, for the client to quote.
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

// Wants says whether a body is to be recorded: that of the answer, or that of the request.
func (r *Record) Wants(answer bool) bool {
	if r == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.verdict.level == LevelRequestResponse || !answer && r.verdict.level == LevelRequest
}

// Object says what the request was about, where its URL did not.
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

// Body records the body of the request or of the answer, if it is wanted and not too long. What may be in the light form of
// a kind is given with that; what a client sent never is.
func (r *Record) Body(answer bool, o runtime.Object, of *api.Kind) {
	if o == nil || !r.Wants(answer) {
		return
	}
	data, whole := encode(o, of, r.verdict.omitManagedFields)
	r.Raw(answer, data, whole)
}

// Raw is Body with the bytes of a JSON document.
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

// Refused says why the request is refused.
func (r *Record) Refused(s *metav1.Status) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status = s
}

// Started says that an answer that lasts has begun.
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

// Done ends the record. Later calls do nothing.
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
	if !r.known { // it was refused before anybody knew who asks
		r.judge(Attributes{Path: r.origin.URI})
	}
	stage := StageResponseComplete
	if panicked {
		stage = StagePanic
	}
	_ = r.emit(stage, code)
}

// emit puts an event into the log, if the policy wants it. code is 0 before there is an answer. The lock is held.
func (r *Record) emit(stage Stage, code int) error {
	v := &r.verdict
	if v.level == LevelNone || slices.Contains(v.omit, stage) {
		return nil
	}
	if r.a.policy.changes && !r.at.Changes && code < http.StatusBadRequest && stage != StagePanic {
		return nil
	}
	// Of a stranger's request it is not known yet, as it comes, whether it will be refused.
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

// longBody is the size from which a body is left out of the record; the log has lines, not files.
const longBody = 128 << 10

// encode is the JSON of an object, which may be in the light form of the kind, where that is not nil; whole is false when it is too long, as far
// as it was looked at.
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
