// Package endpoints translates between HTTP and api.Request: paths, options,
// bodies and representations on the way in, objects, tables, streams and errors
// on the way out. It decides nothing: the Backend does.
package endpoints

import (
	"context"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
)

// Result is a Backend's answer.
type Result struct {
	Object  runtime.Object
	Created bool // the write made the object
	Deleted bool // the delete removed it, not only marked it
}

// Backend is the pipeline from stage 2 on. Errors are *apierrors.StatusError.
type Backend interface {
	// Serve performs every verb but watch and connect. body reads what the request
	// carries into it and is called once the user is known to be allowed to send it.
	Serve(ctx context.Context, r *api.Request, body func(context.Context) error) (Result, error)
	Watch(ctx context.Context, r *api.Request) (watch.Interface, error)
	// Connect authorizes a byte stream and returns the object at its other end.
	Connect(ctx context.Context, r *api.Request) (api.Object, error)
	// Unknown authorizes the look for a resource that is not served: nil means that its absence may be told.
	Unknown(ctx context.Context, u api.User, verb api.Verb, t Target) error
	// Encoded returns the bytes of an object, shared among callers where it is a cached one.
	Encoded(obj runtime.Object, media string) ([]byte, error)
}

// Pass is the room that a request has while it is under way.
type Pass interface {
	// Expect waits for room for so many more bytes.
	Expect(ctx context.Context, bytes int64) error
	Leave()
}

// Connector serves a byte stream to an object that Connect returned.
type Connector interface {
	ServeStream(w http.ResponseWriter, r *http.Request, req *api.Request, obj api.Object)
}

// Config is what a Handler is made of; every field but Live, Refused and Sends is required.
type Config struct {
	Backend        Backend
	Kinds          *api.Kinds
	Scheme         *runtime.Scheme
	Streams        Connector
	MaxBodyBytes   int64
	RequestTimeout time.Duration
	MinWatch       time.Duration
	Clock          func() time.Time
	// Live completes objects that are read; see apiserver.Config.
	Live func(ctx context.Context, kind *api.Kind, items []api.Object) []api.Object
	// CatchUp waits until every kind is served that anybody in the cluster has been told of.
	CatchUp func(ctx context.Context) error
	// Refused hears of every error that is answered.
	Refused func(ctx context.Context, s *metav1.Status)
	// Enter waits for room for a request, as far as it is known what it takes.
	Enter func(ctx context.Context, req *api.Request, bytes int64) (Pass, error)
	// Sends returns what hears of each event that a watch of the kind sends, and of its bytes; may be nil.
	Sends func(k *api.Kind) func(bytes int)
	// Closing ends when the server shuts down. Watches end at random within Spread then: their clients come back
	// elsewhere, and not all at once. New watches are refused.
	Closing context.Context
	Spread  time.Duration
}

// Handler answers resource URLs.
type Handler struct {
	Config
	decoder *decoder
	sending inUse
}

// New returns a handler.
func New(c Config) *Handler { return &Handler{Config: c, decoder: newDecoder(c.Scheme)} }

// Serve answers a request of the user for the target of its URL. The request it
// built is returned for the metrics; it is nil when the URL names nothing that is served.
func (h *Handler) Serve(w http.ResponseWriter, r *http.Request, t Target, u api.User, timer *api.StageTimer) *api.Request {
	var q url.Values
	if r.URL.RawQuery != "" {
		q = r.URL.Query()
	}
	watching := isTrue(q, "watch")
	verb := VerbOf(r.Method, t, watching)
	kind := h.Kinds.ByResource(t.GVR)
	if strings.Contains(t.GVR.Group, ".") && (kind == nil || kind.Definition != "" && !(has(kind, t) && serves(kind, t, verb))) {
		if err := h.Backend.Unknown(r.Context(), u, verb, t); err != nil {
			h.Error(w, r, err)
			return nil
		}
		// A definition that somebody was told of may be on its way to this replica, or not be served here yet.
		if err := h.CatchUp(r.Context()); err != nil {
			h.Error(w, r, err)
			return nil
		}
		kind = h.Kinds.ByResource(t.GVR)
	}
	if !has(kind, t) {
		h.unknown(w, r, t, u, verb)
		return nil
	}
	if kind.Deprecated != "" {
		api.Warn(r.Context(), kind.Deprecated)
	}
	req := &api.Request{
		User: u, Verb: verb, Kind: kind, Subresource: t.Subresource, Namespace: t.Namespace, Name: t.Name,
		UserAgent: api.Clip(r.UserAgent(), maxUserAgent), TraceParent: traceParent(r), Stages: timer,
	}
	if !serves(kind, t, verb) {
		h.Error(w, r, apierrors.NewMethodNotSupported(kind.GroupResource(), methodVerb(r.Method, verb)))
		return req
	}
	if verb != api.VerbConnect {
		if err := decodeOptions(q, req); err != nil {
			h.Error(w, r, err)
			return req
		}
	}
	pass, err := h.Enter(r.Context(), req, h.expected(r, verb))
	if err != nil {
		h.Error(w, r, err)
		return req
	}
	defer pass.Leave()
	if verb == api.VerbConnect {
		h.connect(w, r, req)
		return req
	}
	if t.Watch && t.Name != "" {
		onlyName(&req.List, t.Name)
	}
	if verb == api.VerbWatch {
		h.watch(w, r, req)
		return req
	}
	h.do(w, r, req, pass, h.timeout(q))
	return req
}

// What requests are expected to take: a body grows when it is decoded, compared,
// stored and sent to the other replicas; a patch besides by what it makes.
const (
	anyRequest  = 64 << 10
	bodyGrows   = 8
	patchGrows  = 16
	jsonPatches = 4 << 20
	listGrows   = 6 // of a list that is put together as a whole
)

// expected is what a request takes as far as its head tells. A list is known when it has been found.
func (h *Handler) expected(r *http.Request, verb api.Verb) int64 {
	body := min(r.ContentLength, h.MaxBodyBytes)
	if body < 0 {
		body = h.MaxBodyBytes // it does not say
	}
	switch verb {
	case api.VerbCreate, api.VerbUpdate, api.VerbDelete, api.VerbDeleteCollection:
		return anyRequest + bodyGrows*body
	case api.VerbPatch:
		if t, err := patchType(r); err == nil && t == types.JSONPatchType {
			return anyRequest + jsonPatches + bodyGrows*body
		}
		return anyRequest + patchGrows*body
	}
	return anyRequest
}

// Carries is what a request is expected to take that came with its body decoded already.
func Carries(r *api.Request) int64 {
	body := int64(len(r.Patch))
	if m, ok := r.Object.(interface{ Size() int }); ok {
		body += int64(m.Size())
	}
	return anyRequest + bodyGrows*body
}

// listTakes is what a list takes until it has been sent: its objects cannot be
// let go before, also when they are replaced or deleted meanwhile.
func listTakes(l *api.ObjectList) int64 {
	if streams(l) {
		return l.Bytes
	}
	return listGrows * l.Bytes
}

// maxUserAgent is what is kept of how a client calls itself.
const maxUserAgent = 1024

// traceParent is the client's trace context, "" when it has none that can be read.
func traceParent(r *http.Request) string {
	if p := r.Header.Get("Traceparent"); api.TraceID(p) != "" {
		return p
	}
	return ""
}

func methodVerb(method string, v api.Verb) string {
	if v != "" {
		return string(v)
	}
	return method
}

func (h *Handler) unknown(w http.ResponseWriter, r *http.Request, t Target, u api.User, verb api.Verb) {
	if err := h.Backend.Unknown(r.Context(), u, verb, t); err != nil {
		h.Error(w, r, err)
		return
	}
	h.Error(w, r, &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound,
		Message: "the server could not find the requested resource", Details: &metav1.StatusDetails{},
	}})
}

// do performs everything that is one question and one answer.
func (h *Handler) do(w http.ResponseWriter, r *http.Request, req *api.Request, pass Pass, timeout time.Duration) {
	format, err := negotiateFor(r, req)
	if err != nil {
		h.Error(w, r, err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), timeout)
	defer cancel()
	if req.Kind.Definition != "" {
		r = withBodyAgain(r)
	}
	req.Pointers, req.Expect = req.Verb == api.VerbList, pass.Expect
	req.Light = req.Verb == api.VerbList // one after the other is unpacked when it is encoded
	var res Result
	err = h.withKindOfNow(ctx, req, func() error {
		var err error
		res, err = h.Backend.Serve(ctx, req, func(ctx context.Context) error { return h.body(ctx, w, r, req) })
		return err
	})
	if err != nil {
		h.Error(w, r, err)
		return
	}
	h.complete(ctx, req, &res)
	if l, ok := res.Object.(*api.ObjectList); ok {
		if err := pass.Expect(ctx, listTakes(l)); err != nil {
			h.Error(w, r, err)
			return
		}
	}
	if req.TraceParent != "" && res.Object != nil && req.Verb != api.VerbGet && req.Verb != api.VerbList {
		w.Header().Set("Traceparent", req.TraceParent)
	}
	if req.Verb == api.VerbDelete && res.Deleted && !req.Kind.ReturnsDeleted {
		format.As, res.Object = viewObject, gone(req.Kind, res.Object)
	}
	h.answer(ctx, w, r, req, format, code(req, res), res.Object)
}

// gone is the answer to a deletion that left nothing of the object: its name, and which one it was.
func gone(k *api.Kind, obj runtime.Object) *metav1.Status {
	details := &metav1.StatusDetails{Group: k.GVK.Group, Kind: k.Resource}
	if o, ok := obj.(api.Object); ok {
		details.Name, details.UID = o.GetName(), o.GetUID()
	}
	return &metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusSuccess, Details: details,
	}
}

// complete puts what is in no store into what was read. A reader who names a resourceVersion wants a state that was
// stored: informers, which learn of nothing else afterwards either.
func (h *Handler) complete(ctx context.Context, req *api.Request, res *Result) {
	if h.Live == nil {
		return
	}
	switch o := res.Object.(type) {
	case *api.ObjectList:
		if req.Verb == api.VerbList && req.List.ResourceVersion == "" {
			l := *o
			l.Items = h.Live(ctx, req.Kind, o.Items)
			res.Object = &l
		}
	case api.Object:
		if req.Verb == api.VerbGet && req.Subresource == "" && req.Get.ResourceVersion == "" {
			res.Object = h.Live(ctx, req.Kind, []api.Object{o})[0]
		}
	}
}

// code is the HTTP status of a success.
func code(req *api.Request, res Result) int {
	switch {
	case res.Created:
		return http.StatusCreated
	case req.Verb == api.VerbDelete && !res.Deleted && req.Delete.OrphanDependents != nil && !*req.Delete.OrphanDependents:
		return http.StatusAccepted
	}
	return http.StatusOK
}

func (h *Handler) timeout(q url.Values) time.Duration {
	if v := q.Get("timeout"); v != "" {
		if d, err := time.ParseDuration(v); err == nil && d > 0 && d < h.RequestTimeout {
			return d
		}
	}
	return h.RequestTimeout
}

// body reads what the verb carries.
func (h *Handler) body(ctx context.Context, w http.ResponseWriter, r *http.Request, req *api.Request) error {
	switch req.Verb {
	case api.VerbCreate, api.VerbUpdate:
		media, err := contentType(r)
		if err != nil {
			return err
		}
		data, err := readBody(w, r, h.MaxBodyBytes)
		if err != nil {
			return err
		}
		want, into := h.bodyType(req)
		req.Object = into
		return h.decoder.decode(ctx, data, media, want, into, fieldValidation(req))
	case api.VerbPatch:
		var err error
		if req.PatchType, err = patchType(r); err != nil {
			return err
		}
		if err := invalid("PatchOptions", metav1validation.ValidatePatchOptions(&req.PatchO, req.PatchType)); err != nil {
			return err
		}
		if req.Patch, err = readBody(w, r, h.MaxBodyBytes); err != nil {
			return err
		}
		if req.PatchType == types.ApplyCBORPatchType {
			return applyCBOR(req)
		}
		return checkPatchFields(ctx, req)
	case api.VerbDelete, api.VerbDeleteCollection:
		data, err := readBody(w, r, h.MaxBodyBytes)
		if err != nil {
			return err
		}
		media := mediaJSON
		if len(data) > 0 {
			if media, err = contentType(r); err != nil {
				return err
			}
		}
		return h.deleteOptions(data, media, req)
	}
	return nil
}

// bodyType is the type of a create's or update's body: that of the kind, or of the facet.
func (h *Handler) bodyType(req *api.Request) (schema.GroupVersionKind, runtime.Object) {
	if sub := req.Kind.Subresources[req.Subresource]; sub != nil && sub.New != nil {
		return sub.GVK, sub.New()
	}
	return req.Kind.GVK, req.Kind.New()
}

var patchTypes = []string{
	string(types.JSONPatchType), string(types.MergePatchType), string(types.StrategicMergePatchType),
	string(types.ApplyYAMLPatchType), string(types.ApplyCBORPatchType),
}

func patchType(r *http.Request) (types.PatchType, error) {
	media := r.Header.Get("Content-Type")
	for i, c := range media {
		if c == ';' {
			media = media[:i]
			break
		}
	}
	if !slices.Contains(patchTypes, media) {
		return "", unsupportedMedia(patchTypes...)
	}
	return types.PatchType(media), nil
}

func isTrue(q map[string][]string, name string) bool {
	v, ok := q[name]
	return ok && len(v) > 0 && v[0] != "false" && v[0] != "0"
}
