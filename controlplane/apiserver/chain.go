package apiserver

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/fields"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/audit"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
	"keelson.dev/keelson/controlplane/apiserver/subresource"
	"keelson.dev/keelson/controlplane/registry"
)

// chain is the request pipeline: authorization, admission, validation and the registry. serve runs
// it for every request. HTTP requests come from http.go, already authenticated (stage 1); callers
// in this process set the user themselves.
type chain struct {
	name       string
	registry   *registry.Registry
	kinds      *api.Kinds
	authorizer authz.Authorizer
	rules      *authz.Follower // the RBAC and node rules of the authorizer
	ready      <-chan struct{} // closed once the authorizer has read its rules
	mutating   admission.Mutators
	validating admission.Validators
	mutate     func(context.Context, *api.Attempt) error // mutating.Admit, measured
	validate   func(context.Context, *api.Attempt) error // validating.Admit, measured
	verbs      *subresource.Verbs
	timeline   *api.Timeline
	leader     func() string // returns the name of the leader; may be nil
	clock      func() time.Time
	audit      *audit.Auditor // nil = nothing is recorded
}

// serve runs the pipeline for one request, stage by stage. body decodes the request body and is
// called after authorization; nil if the body is already decoded.
func (c *chain) serve(ctx context.Context, r *api.Request, body func(context.Context) error) (endpoints.Result, error) {
	// Stage 1, authentication: the request already has its user.
	if r.User.Name == "" {
		return endpoints.Result{}, unauthorized("the request names no user")
	}
	// Stage 2, authorization.
	if err := c.authorize(ctx, r); err != nil {
		return endpoints.Result{}, err
	}
	if body != nil {
		if err := body(ctx); err != nil {
			return endpoints.Result{}, err
		}
	}
	record := audit.Of(ctx)
	recordBody(record, r)
	// Stages 3, 4 and 5 are c.Mutate and c.Validate. The registry calls them after it reads the
	// stored object and before it commits the new one. It calls them again after a conflict at the
	// commit. Stage 6 is the registry.
	res, err := c.perform(ctx, r, c)
	if err == nil {
		c.record(r, res)
		recordAnswer(record, r, res.Object)
	}
	return res, err
}

// Mutate runs stage 3, mutating admission, plugin by plugin. It implements registry.Admission.
func (c *chain) Mutate(ctx context.Context, a *api.Attempt) error {
	if r := a.Request; a.Creates() && (r.Verb == api.VerbPatch || r.Verb == api.VerbUpdate) {
		// An apply or update that creates the object also requires the create verb.
		create := *r
		create.Verb = api.VerbCreate
		if err := c.authorize(ctx, &create); err != nil {
			return err
		}
	}
	identify(a)
	if err := c.mutate(ctx, a); err != nil {
		return err
	}
	a.Request.Stages.Mark("admitted", "", c.clock())
	return nil
}

// identify sets apiVersion and kind of the attempt's objects where they are empty, as in objects
// that callers in this process create. Webhooks and policies decode the objects by these fields.
// The old object is shared, so identify replaces it by a copy.
func identify(a *api.Attempt) {
	gvk := a.BodyKind()
	if o := a.Object; o != nil && o.GetObjectKind().GroupVersionKind().Empty() {
		o.GetObjectKind().SetGroupVersionKind(gvk)
	}
	if o := a.OldObject; o != nil && o.GetObjectKind().GroupVersionKind().Empty() {
		a.OldObject = o.DeepCopyObject()
		a.OldObject.GetObjectKind().SetGroupVersionKind(gvk)
	}
}

// Validate runs stage 4, the validation rules of the kind, and stage 5, validating admission. It
// implements registry.Admission.
func (c *chain) Validate(ctx context.Context, a *api.Attempt) error {
	if err := validateSchema(ctx, a); err != nil {
		return err
	}
	if err := c.validate(ctx, a); err != nil {
		return err
	}
	a.Request.Stages.Mark("validated", "", c.clock())
	return nil
}

// authorize runs stage 2. It returns a 401 or 403 error if the user may not perform the request.
func (c *chain) authorize(ctx context.Context, r *api.Request) error {
	return c.decide(ctx, authz.Of(r), r.Stages)
}

func (c *chain) decide(ctx context.Context, a *authz.Attributes, timer *api.StageTimer) error {
	d, reason := c.judge(ctx, a)
	if d == authz.NoOpinion && !isClosed(c.ready) {
		// Rules that are not read yet may allow the request.
		if err := awaitRead(ctx, c.ready, "authorization rules"); err != nil {
			return err
		}
		d, reason = c.judge(ctx, a)
	}
	if d != authz.Allow {
		if a.User.Name == api.UserAnonymous {
			return unauthorized("Unauthorized") // credentials may allow it
		}
		api.Annotate(ctx, "authorization.k8s.io/decision", "forbid")
		api.Annotate(ctx, "authorization.k8s.io/reason", reason)
		return authz.Forbidden(a, reason)
	}
	timer.Mark("authorized", "", c.clock())
	return nil
}

// judge returns the authorizer's decision. If no rule allows the request, it first waits for the
// newest rules. A binding is therefore effective at every replica as soon as its creation is
// acknowledged.
func (c *chain) judge(ctx context.Context, a *authz.Attributes) (authz.Decision, string) {
	mark := c.rules.Mark()
	d, reason := c.authorizer.Authorize(ctx, a)
	if d != authz.NoOpinion || a.User.Name == api.UserAnonymous || !isClosed(c.ready) {
		return d, reason
	}
	short, cancel := context.WithTimeout(ctx, newestRulesWait)
	defer cancel()
	// If the newest rules are not available in time, the decision by the known rules stands.
	if behind, err := c.rules.Behind(short, mark); err == nil && behind {
		d, reason = c.authorizer.Authorize(ctx, a)
	}
	return d, reason
}

// newestRulesWait is how long a denied request waits at most for the newest rules.
const newestRulesWait = time.Second

// rulesWait is how long a request waits for a starting replica to read its rules.
const rulesWait = 10 * time.Second

// awaitRead waits until read is closed, at most rulesWait. It then returns a 503 that names what is
// not read yet.
func awaitRead(ctx context.Context, read <-chan struct{}, what string) error {
	t := time.NewTimer(rulesWait)
	defer t.Stop()
	select {
	case <-read:
		return nil
	case <-ctx.Done():
	case <-t.C:
	}
	err := apierrors.NewServiceUnavailable("this replica has not read the " + what + " yet")
	err.ErrStatus.Details = &metav1.StatusDetails{RetryAfterSeconds: 1}
	return err
}

// validateSchema runs stage 4 on the whole object: the kind's validation of the new object and of
// the change from the stored one. Some subresources have their own rules. It also refuses fields
// without an implementation and adds warnings for the client.
func validateSchema(ctx context.Context, a *api.Attempt) error {
	k, obj, old := a.Kind, a.Whole, a.Stored
	if obj == nil {
		return validateBody(ctx, a)
	}
	var errs field.ErrorList
	sub := k.Subresources[a.Facet]
	switch {
	case k.Check != nil:
		errs = k.Check(ctx, a.Facet, obj, old)
	case a.Facet == "binding":
		if err := validateBody(ctx, a); err != nil {
			return err
		}
	case sub != nil && sub.Merge == nil:
		if sub.ValidateUpdate != nil && old != nil {
			errs = sub.ValidateUpdate(obj, old)
		}
	default:
		errs = k.Judge(obj, old)
		if k.ValidateUpdate != nil && old != nil {
			errs = append(errs, k.ValidateUpdate(obj, old)...)
		}
	}
	// The validation of ephemeralcontainers already refuses such fields, and a binding adds none.
	if a.Facet != "ephemeralcontainers" && a.Facet != "binding" {
		errs = append(errs, unbuilt(ctx, k.Answers, obj, old)...)
	}
	if len(errs) > 0 {
		return apierrors.NewInvalid(k.GVK.GroupKind(), obj.GetName(), errs)
	}
	if k.Warnings != nil && a.Facet == "" && api.CollectsWarnings(ctx) {
		for _, text := range k.Warnings(obj, old) {
			api.Warn(ctx, text)
		}
	}
	if stored := k.Answers.Stored(); stored != nil && old == nil {
		api.Warn(ctx, k.GroupResource().String()+": stored; "+stored.Why)
	}
	return nil
}

// unbuilt returns an error for each field that is set and not implemented here. It warns the client
// of fields that have no effect in Kubernetes either.
func unbuilt(ctx context.Context, a *fields.Answers, obj, old any) field.ErrorList {
	errs, warnings := a.Check(obj, old)
	for _, w := range warnings {
		api.Warn(ctx, w)
	}
	return errs
}

// validateBody runs stage 4 for bodies that are not stored: objects of virtual kinds, tokens,
// bindings and evictions.
func validateBody(ctx context.Context, a *api.Attempt) error {
	if a.Object == nil || a.Operation != api.Create {
		return nil
	}
	k, answers := a.Kind.GVK.GroupKind(), a.Kind.Answers
	if sub := a.Kind.Subresources[a.Facet]; sub != nil {
		k, answers = sub.GVK.GroupKind(), sub.Answers
	}
	if errs := unbuilt(ctx, answers, a.Object, nil); len(errs) > 0 {
		return apierrors.NewInvalid(k, a.Name, errs)
	}
	return nil
}

// perform runs stage 6: it calls the registry, or the implementation of the subresource, for the
// verb of the request.
func (c *chain) perform(ctx context.Context, r *api.Request, a registry.Admission) (endpoints.Result, error) {
	if r.Kind.Virtual {
		obj, err := c.verbs.Answer(ctx, r, a)
		return result(obj, err == nil && r.Verb == api.VerbCreate, false, err)
	}
	switch r.Verb {
	case api.VerbGet:
		obj, err := c.registry.Get(ctx, r)
		if err != nil {
			return endpoints.Result{}, err
		}
		if sub := r.Kind.Subresources[r.Subresource]; sub != nil && sub.View != nil {
			return endpoints.Result{Object: sub.View(obj)}, nil
		}
		return endpoints.Result{Object: obj}, nil
	case api.VerbList:
		obj, err := c.registry.List(ctx, r)
		return result(obj, false, false, err)
	case api.VerbCreate:
		return c.create(ctx, r, a)
	case api.VerbUpdate:
		obj, created, err := c.registry.Update(ctx, r, a)
		return result(obj, created, false, err)
	case api.VerbPatch:
		obj, created, err := c.registry.Patch(ctx, r, a)
		return result(obj, created, false, err)
	case api.VerbDelete:
		obj, deleted, err := c.registry.Delete(ctx, r, a)
		return result(obj, false, deleted, err)
	case api.VerbDeleteCollection:
		obj, err := c.registry.DeleteCollection(ctx, r, a)
		return result(obj, false, true, err)
	}
	return endpoints.Result{}, apierrors.NewMethodNotSupported(r.Kind.GroupResource(), string(r.Verb))
}

func (c *chain) create(ctx context.Context, r *api.Request, a registry.Admission) (endpoints.Result, error) {
	var obj runtime.Object
	var err error
	switch r.Subresource {
	case "":
		obj, err = c.registry.Create(ctx, r, a)
	case "binding":
		obj, err = c.verbs.Bind(ctx, r, a)
	case "eviction":
		obj, err = c.verbs.Evict(ctx, r, a)
	case "token":
		obj, err = c.verbs.Token(ctx, r, a)
	default:
		err = apierrors.NewMethodNotSupported(r.Kind.GroupResource(), "create "+r.Subresource)
	}
	return result(obj, err == nil, false, err)
}

func result(obj runtime.Object, created, deleted bool, err error) (endpoints.Result, error) {
	if err != nil {
		return endpoints.Result{}, err
	}
	return endpoints.Result{Object: obj, Created: created, Deleted: deleted}, nil
}

// Watch starts a watch after authorization. It implements api.Backend and endpoints.Backend.
func (c *chain) Watch(ctx context.Context, r *api.Request) (watch.Interface, error) {
	if audit.Of(ctx) != nil { // an HTTP request, which already has an audit record
		return c.watch(ctx, ctx, r)
	}
	recorded, done, err := c.recorded(ctx, r)
	if err != nil {
		return nil, err
	}
	w, err := c.watch(recorded, ctx, r)
	done(false, err)
	return w, err
}

// watch authorizes with the context recorded, which has the audit record. The watch itself runs
// with ctx.
func (c *chain) watch(recorded, ctx context.Context, r *api.Request) (watch.Interface, error) {
	if r.User.Name == "" {
		return nil, unauthorized("the request names no user")
	}
	if err := c.authorize(recorded, r); err != nil {
		return nil, err
	}
	return c.registry.Watch(ctx, r)
}

// Do performs a request of a caller in this process and implements api.Backend. The request passes
// all stages and has an audit record of its own.
func (c *chain) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	if r.Stages == nil && c.timeline != nil && traced(r) {
		r.Stages = api.StartStages("apiserver/"+c.name, c.clock())
	}
	ctx, done, err := c.recorded(ctx, r)
	if err != nil {
		return nil, err
	}
	res, err := c.serve(ctx, r, nil)
	done(res.Created, err)
	if err != nil {
		return nil, err
	}
	return res.Object, nil
}

// traced reports whether a write from within this process is recorded in a timeline. This applies
// if it binds a pod or creates an object with a trace parent.
func traced(r *api.Request) bool {
	if r.Verb != api.VerbCreate {
		return false
	}
	if r.Subresource == "binding" || r.TraceParent != "" {
		return true
	}
	o, ok := r.Object.(metav1.Object)
	return ok && r.Subresource == "" && o.GetAnnotations()[api.TraceParentAnnotation] != ""
}

// record adds the stages of a committed write to the timeline, under the trace of the object.
// Status updates are not recorded.
func (c *chain) record(r *api.Request, res endpoints.Result) {
	if r.Stages == nil || c.timeline == nil || r.Subresource == "status" {
		return
	}
	trace, name := r.TraceParent, r.Name
	if o, ok := res.Object.(metav1.Object); ok {
		name = o.GetName()
		if own := o.GetAnnotations()[api.TraceParentAnnotation]; own != "" {
			trace = own
		}
	} else if r.Subresource != "" {
		trace = c.traceOf(r, trace)
	}
	object := strings.ToLower(r.Kind.GVK.Kind) + "/" + name
	if r.Kind.Namespaced {
		object = strings.ToLower(r.Kind.GVK.Kind) + "/" + r.Namespace + "/" + name
	}
	stages := r.Stages.Stages(api.TraceID(trace), object)
	i := slices.IndexFunc(stages, func(s api.Stage) bool { return s.Name == "committed" })
	if i < 0 {
		return
	}
	if c.leader != nil {
		stages[i].Detail += ", leader " + c.leader()
	}
	c.timeline.Record(stages...)
}

// traceOf returns the trace parent of the stored object if the response does not contain it, as for
// the pod of a Binding. If the object has no trace parent or cannot be read, it returns otherwise.
func (c *chain) traceOf(r *api.Request, otherwise string) string {
	get := &api.Request{Verb: api.VerbGet, Kind: r.Kind, Namespace: r.Namespace, Name: r.Name}
	get.Get.ResourceVersion = "0"
	o, err := c.registry.Get(context.Background(), get)
	if err != nil { // the cache may lag behind the store
		get.Get.ResourceVersion = ""
		if o, err = c.registry.Get(context.Background(), get); err != nil {
			return otherwise
		}
	}
	if own := o.GetAnnotations()[api.TraceParentAnnotation]; own != "" {
		return own
	}
	return otherwise
}

func unauthorized(reason string) error {
	if reason == "" {
		reason = "Unauthorized"
	}
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusUnauthorized, Reason: metav1.StatusReasonUnauthorized, Message: reason,
	}}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
