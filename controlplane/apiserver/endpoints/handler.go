// Package endpoints translates between HTTP and api.Request. It decodes paths, options and bodies
// of requests, and encodes responses as objects, tables, lists, watch streams and errors. It does
// not decide whether a request is allowed or what it does; the Backend does.
package endpoints

import (
	"context"
	"errors"
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

// Result is the result of a request that a Backend has performed.
type Result struct {
	Object  runtime.Object
	Created bool // the write created the object
	Deleted bool // the delete removed the object, instead of only setting its deletion timestamp
}

// Backend is the request pipeline after authentication: stage 2 (authorization) and all later
// stages. Errors are *apierrors.StatusError.
type Backend interface {
	// Serve performs a request of any verb except watch and connect. body decodes the request body
	// into r; Serve calls it after the request is authorized.
	Serve(ctx context.Context, r *api.Request, body func(context.Context) error) (Result, error)
	Watch(ctx context.Context, r *api.Request) (watch.Interface, error)
	// Connect authorizes a connect request, such as exec, and returns the object to connect to.
	Connect(ctx context.Context, r *api.Request) (api.Object, error)
	// Unknown authorizes a request for a resource that is not served. It returns nil if the user
	// may see that the resource does not exist.
	Unknown(ctx context.Context, u api.User, verb api.Verb, t Target) error
	// Encoded returns obj encoded for a media type. The bytes of cached objects are shared and must
	// not be changed.
	Encoded(obj runtime.Object, media string) ([]byte, error)
}

// Pass is the admission of a running request by the concurrency limits, with its reserved memory.
// Leave releases the reservation.
type Pass interface {
	// Expect waits until the given number of further bytes is reserved for the request. It returns
	// an error if the limit is reached.
	Expect(ctx context.Context, bytes int64) error
	Leave()
}

// Connector serves the byte stream of a connect request to the object that Backend.Connect
// returned.
type Connector interface {
	ServeStream(w http.ResponseWriter, r *http.Request, req *api.Request, obj api.Object)
}

// Config holds the dependencies and limits of a Handler. All fields except Live, Refused and
// WatchMetrics are required.
type Config struct {
	Backend        Backend
	Kinds          *api.Kinds
	Scheme         *runtime.Scheme
	Streams        Connector
	MaxBodyBytes   int64
	RequestTimeout time.Duration
	MinWatch       time.Duration
	Clock          func() time.Time
	// Live adds current values that are not stored to objects that a client reads; see
	// apiserver.StateConfig.
	Live func(ctx context.Context, kind *api.Kind, items []api.Object) []api.Object
	// CatchUp waits until this replica serves all CustomResourceDefinitions that are committed in
	// the cluster.
	CatchUp func(ctx context.Context) error
	// Refused is called with the status of every error response.
	Refused func(ctx context.Context, s *metav1.Status)
	// Enter waits until the request may run and reserves the given number of bytes for it. It
	// returns an error if the limits are reached.
	Enter func(ctx context.Context, req *api.Request, bytes int64) (Pass, error)
	// WatchMetrics returns the metrics of the watch that a request starts; may be nil.
	WatchMetrics func(req *api.Request) WatchMetrics
	// Closing ends when the server shuts down. New watches are then refused, and running watches
	// end at random times within Spread, so that their clients reconnect to other replicas at
	// different times.
	Closing context.Context
	Spread  time.Duration
}

// Handler serves the requests for resources. The paths of these requests start with /api or /apis.
type Handler struct {
	cfg       Config
	decoder   *decoder
	encodings sharedEncodings
}

// New returns a Handler with the configuration c.
func New(c Config) *Handler { return &Handler{cfg: c, decoder: newDecoder(c.Scheme)} }

// Serve serves a request of user u for the target t, which its URL names. It returns the
// api.Request, which the metrics need; nil if the URL does not name a served resource.
func (h *Handler) Serve(
	w http.ResponseWriter, r *http.Request, t Target, u api.User, timer *api.StageTimer,
) *api.Request {
	var q url.Values
	if r.URL.RawQuery != "" {
		q = r.URL.Query()
	}
	watching := isTrue(q, "watch")
	verb := VerbOf(r.Method, t, watching)
	kind := h.cfg.Kinds.ByResource(t.GVR)
	if strings.Contains(t.GVR.Group, ".") &&
		(kind == nil || kind.Serving.Definition != "" && !(hasTarget(kind, t) && supportsVerb(kind, t, verb))) {
		if err := h.cfg.Backend.Unknown(r.Context(), u, verb, t); err != nil {
			h.WriteError(w, r, err)
			return nil
		}
		// This replica may not serve a recently created CustomResourceDefinition yet.
		if err := h.cfg.CatchUp(r.Context()); err != nil {
			h.WriteError(w, r, err)
			return nil
		}
		kind = h.cfg.Kinds.ByResource(t.GVR)
	}
	if !hasTarget(kind, t) {
		h.serveUnknown(w, r, t, u, verb)
		return nil
	}
	if kind.Serving.Deprecated != "" {
		api.Warn(r.Context(), kind.Serving.Deprecated)
	}
	req := &api.Request{
		User: u, Verb: verb, Kind: kind, Subresource: t.Subresource, Namespace: t.Namespace, Name: t.Name,
		Client: api.ClientInfo{UserAgent: api.Truncate(r.UserAgent(), maxUserAgent), TraceParent: traceParent(r),
			Stages: timer},
	}
	if !supportsVerb(kind, t, verb) {
		h.WriteError(w, r, apierrors.NewMethodNotSupported(kind.GroupResource(), methodVerb(r.Method, verb)))
		return req
	}
	if verb != api.VerbConnect {
		if err := decodeOptions(q, req); err != nil {
			h.WriteError(w, r, err)
			return req
		}
	}
	pass, err := h.cfg.Enter(r.Context(), req, h.estimateMemory(r, verb))
	if err != nil {
		h.WriteError(w, r, err)
		return req
	}
	defer pass.Leave()
	if verb == api.VerbConnect {
		h.serveConnect(w, r, req)
		return req
	}
	if t.Watch && t.Name != "" {
		onlyName(&req.List, t.Name)
	}
	if verb == api.VerbWatch {
		h.serveWatch(w, r, req)
		return req
	}
	h.serveVerb(w, r, req, pass, h.requestTimeout(q))
	return req
}

// Estimated memory of a request: in bytes, and as multiples of the size of its body. A body takes
// more memory when it is decoded, compared, stored and sent to the other replicas. A patch also
// creates a result.
const (
	anyRequest  = 64 << 10
	bodyGrows   = 8
	patchGrows  = 16
	jsonPatches = 4 << 20
	listGrows   = 6 // for a list that is encoded as a whole
)

// estimateMemory returns the estimated memory of a request in bytes, from its headers. The memory
// of a list is added after it is read.
func (h *Handler) estimateMemory(r *http.Request, verb api.Verb) int64 {
	body := min(r.ContentLength, h.cfg.MaxBodyBytes)
	if body < 0 {
		body = h.cfg.MaxBodyBytes // the length of the body is unknown
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

// EstimateBody returns the estimated memory in bytes of a request with a body that is already
// decoded.
func EstimateBody(r *api.Request) int64 {
	body := int64(len(r.Patch.Body))
	if m, ok := r.Object.(interface{ Size() int }); ok {
		body += int64(m.Size())
	}
	return anyRequest + bodyGrows*body
}

// estimateListMemory returns the estimated memory in bytes that a list takes until it is sent. It
// includes the objects: the list retains them even if they are replaced or deleted meanwhile.
func estimateListMemory(l *api.ObjectList) int64 {
	if isStreamed(l) {
		return l.Bytes
	}
	return listGrows * l.Bytes
}

// maxUserAgent is the maximum number of bytes of the User-Agent header that a request stores.
const maxUserAgent = 1024

// traceParent returns the Traceparent header of a request; "" if it is missing or invalid.
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

func (h *Handler) serveUnknown(w http.ResponseWriter, r *http.Request, t Target, u api.User, verb api.Verb) {
	if err := h.cfg.Backend.Unknown(r.Context(), u, verb, t); err != nil {
		h.WriteError(w, r, err)
		return
	}
	h.WriteError(w, r, &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound,
		Message: "the server could not find the requested resource", Details: &metav1.StatusDetails{},
	}})
}

// serveVerb performs a request that is neither a watch nor a connect request, and writes the
// response. timeout limits the duration of the request; pass reserves the memory of a list.
func (h *Handler) serveVerb(
	w http.ResponseWriter, r *http.Request, req *api.Request, pass Pass, timeout time.Duration,
) {
	format, err := negotiateFor(r, req)
	if err != nil {
		h.WriteError(w, r, err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), timeout)
	defer cancel()
	if req.Kind.Serving.Definition != "" {
		r = withReplayableBody(r)
	}
	req.Internal.Pointers, req.Internal.Expect = req.Verb == api.VerbList, pass.Expect
	req.Internal.Light = req.Verb == api.VerbList // objects of a list are decompressed one by one when they are encoded
	var res Result
	err = h.retryWithNewKind(ctx, req, func() error {
		var err error
		res, err = h.cfg.Backend.Serve(ctx, req, func(ctx context.Context) error {
			return h.readRequestBody(ctx, w, r, req)
		})
		return err
	})
	if err != nil {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			err = NewTerminationError(err)
		}
		h.WriteError(w, r, err)
		return
	}
	h.addLiveValues(ctx, req, &res)
	if l, ok := res.Object.(*api.ObjectList); ok {
		if err := pass.Expect(ctx, estimateListMemory(l)); err != nil {
			h.WriteError(w, r, err)
			return
		}
	}
	if req.Client.TraceParent != "" && res.Object != nil && req.Verb != api.VerbGet && req.Verb != api.VerbList {
		w.Header().Set("Traceparent", req.Client.TraceParent)
	}
	if req.Verb == api.VerbDelete && res.Deleted && !req.Kind.Deletion.ReturnsDeleted {
		format.As, res.Object = viewObject, deletedStatus(req.Kind, res.Object)
	}
	h.writeResponse(ctx, w, r, req, format, successCode(req, res), res.Object)
}

// deletedStatus returns the Status for a deletion that removed the object. It has the object's name
// and UID.
func deletedStatus(k *api.Kind, obj runtime.Object) *metav1.Status {
	details := &metav1.StatusDetails{Group: k.GVK.Group, Kind: k.Resource}
	if o, ok := obj.(api.Object); ok {
		details.Name, details.UID = o.GetName(), o.GetUID()
	}
	return &metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusSuccess, Details: details,
	}
}

// addLiveValues adds current values that are not stored to the objects of a response (Config.Live).
// It does not change responses to reads with a resourceVersion, such as those of informers, because
// their clients expect a stored state.
func (h *Handler) addLiveValues(ctx context.Context, req *api.Request, res *Result) {
	if h.cfg.Live == nil {
		return
	}
	switch o := res.Object.(type) {
	case *api.ObjectList:
		if req.Verb == api.VerbList && req.List.ResourceVersion == "" {
			l := *o
			l.Items = h.cfg.Live(ctx, req.Kind, o.Items)
			res.Object = &l
		}
	case api.Object:
		if req.Verb == api.VerbGet && req.Subresource == "" && req.Get.ResourceVersion == "" {
			res.Object = h.cfg.Live(ctx, req.Kind, []api.Object{o})[0]
		}
	}
}

// successCode returns the HTTP status code of a successful request.
func successCode(req *api.Request, res Result) int {
	switch {
	case res.Created:
		return http.StatusCreated
	case req.Verb == api.VerbDelete && !res.Deleted && req.Delete.OrphanDependents != nil &&
		!*req.Delete.OrphanDependents:
		return http.StatusAccepted
	}
	return http.StatusOK
}

func (h *Handler) requestTimeout(q url.Values) time.Duration {
	if v := q.Get("timeout"); v != "" {
		if d, err := time.ParseDuration(v); err == nil && d > 0 && d < h.cfg.RequestTimeout {
			return d
		}
	}
	return h.cfg.RequestTimeout
}

// readRequestBody reads and decodes the request body that the verb requires.
func (h *Handler) readRequestBody(ctx context.Context, w http.ResponseWriter, r *http.Request, req *api.Request) error {
	switch req.Verb {
	case api.VerbCreate, api.VerbUpdate:
		media, err := contentType(r)
		if err != nil {
			return err
		}
		data, err := readBody(w, r, h.cfg.MaxBodyBytes)
		if err != nil {
			return err
		}
		want, into := h.bodyType(req)
		req.Object = into
		return h.decoder.decodeObject(ctx, data, media, want, into, fieldValidation(req))
	case api.VerbPatch:
		var err error
		if req.Patch.Type, err = patchType(r); err != nil {
			return err
		}
		if err := newInvalid("PatchOptions", metav1validation.ValidatePatchOptions(&req.Patch.Options,
			req.Patch.Type)); err !=
			nil {
			return err
		}
		if req.Patch.Body, err = readBody(w, r, h.cfg.MaxBodyBytes); err != nil {
			return err
		}
		if req.Patch.Type == types.ApplyCBORPatchType {
			return applyCBOR(req)
		}
		return checkPatchFields(ctx, req)
	case api.VerbDelete, api.VerbDeleteCollection:
		data, err := readBody(w, r, h.cfg.MaxBodyBytes)
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

// bodyType returns the type of the body of a create or update, and a new object of this type. It is
// the type of the subresource if the subresource has its own type, and otherwise the kind.
func (h *Handler) bodyType(req *api.Request) (schema.GroupVersionKind, runtime.Object) {
	if sub := req.Kind.Subresources[req.Subresource]; sub != nil && sub.New != nil {
		return sub.GVK, sub.New()
	}
	return req.Kind.GVK, req.Kind.Type.New()
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
