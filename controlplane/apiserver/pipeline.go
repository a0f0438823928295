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

// pipeline is the request pipeline: authorization, admission, validation and the registry.
// serveRequest runs it for every request. HTTP requests come from http.go and are already
// authenticated (stage 1). Callers in this process set the user themselves.
type pipeline struct {
	name       string
	registry   *registry.Registry
	kinds      *api.Kinds
	authorizer authz.Authorizer
	rules      *authz.Follower // the RBAC and node rules of the authorizer
	ready      chan struct{}   // closed once the authorizer has read its rules
	mutating   admission.Mutators
	validating admission.Validators
	mutate     func(context.Context, *api.Attempt) error // mutating admission (stage 3), with metrics of its duration
	validate   func(context.Context, *api.Attempt) error // validating admission (stage 5), with metrics of its duration
	verbs      *subresource.Verbs
	timeline   *api.Timeline
	leader     func() string // returns the name of the leader; may be nil
	clock      func() time.Time
	audit      *audit.Auditor // nil = nothing is recorded
}

// serveRequest runs the pipeline for one request, stage by stage. body decodes the request body and
// is called after the request is authorized; nil if the body is already decoded.
func (c *pipeline) serveRequest(ctx context.Context, r *api.Request, body func(context.Context) error) (
	endpoints.Result, error,
) {
	// Stage 1, authentication: the request already has its user.
	if r.User.Name == "" {
		return endpoints.Result{}, newUnauthorized("the request has no user")
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
	auditRequestBody(record, r)
	// Stages 3, 4 and 5 are c.Mutate and c.Validate. The registry calls them after it reads the
	// stored object and before it commits the new one. It calls them again after a conflict at the
	// commit. Stage 6 is the registry.
	res, err := c.performVerb(ctx, r, c)
	if err == nil {
		c.recordStages(r, res)
		auditResponseBody(record, r, res.Object)
	}
	return res, err
}

// Mutate runs stage 3, mutating admission, plugin by plugin. It implements registry.Admission.
func (c *pipeline) Mutate(ctx context.Context, a *api.Attempt) error {
	if r := a.Request; a.CreatesObject() && (r.Verb == api.VerbPatch || r.Verb == api.VerbUpdate) {
		// An apply or update that creates the object also requires the create verb.
		create := *r
		create.Verb = api.VerbCreate
		if err := c.authorize(ctx, &create); err != nil {
			return err
		}
	}
	setBodyKind(a)
	if err := c.mutate(ctx, a); err != nil {
		return err
	}
	a.Request.Client.Stages.EndStage("admitted", "", c.clock())
	return nil
}

// setBodyKind sets apiVersion and kind of the attempt's objects where they are empty, as in objects
// that callers in this process create. Webhooks and policies decode the objects by these fields.
// The old object is shared, so it is replaced by a copy.
func setBodyKind(a *api.Attempt) {
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
func (c *pipeline) Validate(ctx context.Context, a *api.Attempt) error {
	if err := validateSchema(ctx, a); err != nil {
		return err
	}
	if err := c.validate(ctx, a); err != nil {
		return err
	}
	a.Request.Client.Stages.EndStage("validated", "", c.clock())
	return nil
}

// authorize runs stage 2. It returns a 401 or 403 error if the user is not allowed to perform the
// request.
func (c *pipeline) authorize(ctx context.Context, r *api.Request) error {
	return c.authorizeAttributes(ctx, authz.Of(r), r.Client.Stages)
}

func (c *pipeline) authorizeAttributes(ctx context.Context, a *authz.Attributes, timer *api.StageTimer) error {
	d, reason := c.decideWithNewestRules(ctx, a)
	if d == authz.NoOpinion && !isClosed(c.ready) {
		// rules that have not been read yet may allow the request
		if err := awaitInitialRead(ctx, c.ready, "authorization rules"); err != nil {
			return err
		}
		d, reason = c.decideWithNewestRules(ctx, a)
	}
	if d != authz.Allow {
		if a.User.Name == api.UserAnonymous {
			return newUnauthorized("Unauthorized") // another request with credentials may be allowed
		}
		api.Annotate(ctx, "authorization.k8s.io/decision", "forbid")
		api.Annotate(ctx, "authorization.k8s.io/reason", reason)
		return authz.Forbidden(a, reason)
	}
	timer.EndStage("authorized", "", c.clock())
	return nil
}

// decideWithNewestRules returns the authorizer's decision. If no rule allows the request, it first
// waits for the newest rules. A binding is therefore effective at every replica as soon as its
// creation is acknowledged.
func (c *pipeline) decideWithNewestRules(ctx context.Context, a *authz.Attributes) (authz.Decision, string) {
	mark := c.rules.Mark()
	d, reason := c.authorizer.Authorize(ctx, a)
	if d != authz.NoOpinion || a.User.Name == api.UserAnonymous || !isClosed(c.ready) {
		return d, reason
	}
	short, cancel := context.WithTimeout(ctx, newestRulesWait)
	defer cancel()
	// if the newest rules are not available in time, the decision remains
	if behind, err := c.rules.ApplyNewest(short, mark); err == nil && behind {
		d, reason = c.authorizer.Authorize(ctx, a)
	}
	return d, reason
}

// newestRulesWait is how long a denied request waits at most for the newest rules.
const newestRulesWait = time.Second

// rulesWait is how long a request waits at most until a starting replica has read its rules.
const rulesWait = 10 * time.Second

// awaitInitialRead waits until read is closed, at most rulesWait. If it is not closed by then, it
// returns a 503 which says that subject has not been read yet.
func awaitInitialRead(ctx context.Context, read <-chan struct{}, subject string) error {
	t := time.NewTimer(rulesWait)
	defer t.Stop()
	select {
	case <-read:
		return nil
	case <-ctx.Done():
	case <-t.C:
	}
	err := apierrors.NewServiceUnavailable("this replica has not read the " + subject + " yet")
	err.ErrStatus.Details = &metav1.StatusDetails{RetryAfterSeconds: 1}
	return err
}

// validateSchema runs stage 4 on the whole object: the kind's validation of the new object and of
// the change from the stored object. Some subresources have their own rules. It also rejects fields
// that this server does not implement, and adds warnings for the client.
func validateSchema(ctx context.Context, a *api.Attempt) error {
	k, obj, old := a.Kind, a.Whole, a.Stored
	if obj == nil {
		return validateBody(ctx, a)
	}
	var errs field.ErrorList
	sub := k.Subresources[a.Facet]
	switch {
	case k.Validation.Check != nil:
		errs = k.Validation.Check(ctx, a.Facet, obj, old)
	case a.Facet == "binding":
		if err := validateBody(ctx, a); err != nil {
			return err
		}
	case sub != nil && sub.Merge == nil:
		if sub.ValidateUpdate != nil && old != nil {
			errs = sub.ValidateUpdate(obj, old)
		}
	default:
		errs = k.ValidateObject(obj, old)
		if k.Validation.Update != nil && old != nil {
			errs = append(errs, k.Validation.Update(obj, old)...)
		}
	}
	if a.Facet != "binding" { // a binding adds no fields
		errs = append(errs, checkImplemented(ctx, k.Schema.Answers, obj, old)...)
	}
	if len(errs) > 0 {
		return apierrors.NewInvalid(k.GVK.GroupKind(), obj.GetName(), errs)
	}
	if k.Validation.Warnings != nil && a.Facet == "" && api.CollectsWarnings(ctx) {
		for _, text := range k.Validation.Warnings(obj, old) {
			api.Warn(ctx, text)
		}
	}
	if stored := k.Schema.Answers.Stored(); stored != nil && old == nil {
		api.Warn(ctx, k.GroupResource().String()+": stored; "+stored.Why)
	}
	return nil
}

// checkImplemented returns an error for each field that is set although this API server does not
// support it. It warns the client of fields that have no effect in Kubernetes either.
func checkImplemented(ctx context.Context, a *fields.Answers, obj, old any) field.ErrorList {
	errs, warnings := a.FindIneffective(obj, old)
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
	k, answers := a.Kind.GVK.GroupKind(), a.Kind.Schema.Answers
	if sub := a.Kind.Subresources[a.Facet]; sub != nil {
		k, answers = sub.GVK.GroupKind(), sub.Answers
	}
	if errs := checkImplemented(ctx, answers, a.Object, nil); len(errs) > 0 {
		return apierrors.NewInvalid(k, a.Name, errs)
	}
	return nil
}

// performVerb runs stage 6: it calls the registry, or the implementation of the subresource, for
// the verb of the request.
func (c *pipeline) performVerb(ctx context.Context, r *api.Request, a registry.Admission) (endpoints.Result, error) {
	if r.Kind.Serving.Virtual {
		obj, err := c.verbs.ServeVirtual(ctx, r, a)
		return newResult(obj, err == nil && r.Verb == api.VerbCreate, false, err)
	}
	switch r.Verb {
	case api.VerbGet:
		obj, err := c.registry.GetObject(ctx, r)
		if err != nil {
			return endpoints.Result{}, err
		}
		if sub := r.Kind.Subresources[r.Subresource]; sub != nil && sub.View != nil {
			return endpoints.Result{Object: sub.View(obj)}, nil
		}
		return endpoints.Result{Object: obj}, nil
	case api.VerbList:
		obj, err := c.registry.List(ctx, r)
		return newResult(obj, false, false, err)
	case api.VerbCreate:
		return c.createObject(ctx, r, a)
	case api.VerbUpdate:
		obj, created, err := c.registry.Update(ctx, r, a)
		return newResult(obj, created, false, err)
	case api.VerbPatch:
		obj, created, err := c.registry.Patch(ctx, r, a)
		return newResult(obj, created, false, err)
	case api.VerbDelete:
		obj, deleted, err := c.registry.Delete(ctx, r, a)
		return newResult(obj, false, deleted, err)
	case api.VerbDeleteCollection:
		obj, err := c.registry.DeleteCollection(ctx, r, a)
		return newResult(obj, false, true, err)
	}
	return endpoints.Result{}, apierrors.NewMethodNotSupported(r.Kind.GroupResource(), string(r.Verb))
}

func (c *pipeline) createObject(ctx context.Context, r *api.Request, a registry.Admission) (endpoints.Result, error) {
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
	return newResult(obj, err == nil, false, err)
}

func newResult(obj runtime.Object, created, deleted bool, err error) (endpoints.Result, error) {
	if err != nil {
		return endpoints.Result{}, err
	}
	return endpoints.Result{Object: obj, Created: created, Deleted: deleted}, nil
}

// Watch authorizes a watch request and starts the watch. It implements api.Backend and
// endpoints.Backend.
func (c *pipeline) Watch(ctx context.Context, r *api.Request) (watch.Interface, error) {
	if audit.Of(ctx) != nil { // an HTTP request, which already has an audit record
		return c.startWatch(ctx, ctx, r)
	}
	recorded, done, err := c.startAuditRecord(ctx, r)
	if err != nil {
		return nil, err
	}
	w, err := c.startWatch(recorded, ctx, r)
	done(false, err)
	return w, err
}

// startWatch authorizes a watch request and starts the watch. authorizationContext contains the
// audit record; the watch itself ends with ctx.
func (c *pipeline) startWatch(authorizationContext, ctx context.Context, r *api.Request) (watch.Interface, error) {
	if r.User.Name == "" {
		return nil, newUnauthorized("the request has no user")
	}
	if err := c.authorize(authorizationContext, r); err != nil {
		return nil, err
	}
	return c.registry.Watch(ctx, r)
}

// Do performs a request of a caller in this process and implements api.Backend. The request passes
// all stages and has an audit record of its own.
func (c *pipeline) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	if r.Client.Stages == nil && c.timeline != nil && isTraced(r) {
		r.Client.Stages = api.StartStages("apiserver/"+c.name, c.clock())
	}
	ctx, done, err := c.startAuditRecord(ctx, r)
	if err != nil {
		return nil, err
	}
	res, err := c.serveRequest(ctx, r, nil)
	done(res.Created, err)
	if err != nil {
		return nil, err
	}
	return res.Object, nil
}

// isTraced reports whether a write from within this process is recorded in a timeline. This is the
// case if it binds a pod, or creates an object with a trace parent.
func isTraced(r *api.Request) bool {
	if r.Verb != api.VerbCreate {
		return false
	}
	if r.Subresource == "binding" || r.Client.TraceParent != "" {
		return true
	}
	o, ok := r.Object.(metav1.Object)
	return ok && r.Subresource == "" && o.GetAnnotations()[api.TraceParentAnnotation] != ""
}

// recordStages adds the stages of a committed write to the timeline, under the trace of the object.
// Status updates are not recorded.
func (c *pipeline) recordStages(r *api.Request, res endpoints.Result) {
	if r.Client.Stages == nil || c.timeline == nil || r.Subresource == "status" {
		return
	}
	trace, name := r.Client.TraceParent, r.Name
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
	stages := r.Client.Stages.Stages(api.TraceID(trace), object)
	i := slices.IndexFunc(stages, func(s api.Stage) bool { return s.Name == "committed" })
	if i < 0 {
		return
	}
	if c.leader != nil {
		stages[i].Detail += ", leader " + c.leader()
	}
	c.timeline.Record(stages...)
}

// traceOf returns the trace parent of the stored object that a request has written. It is for
// responses that do not contain the object, such as that of a Binding. If the object has no trace
// parent or cannot be read, traceOf returns fallback.
func (c *pipeline) traceOf(r *api.Request, fallback string) string {
	get := &api.Request{Verb: api.VerbGet, Kind: r.Kind, Namespace: r.Namespace, Name: r.Name}
	get.Get.ResourceVersion = "0"
	o, err := c.registry.GetObject(context.Background(), get)
	if err != nil { // the cache may be behind the store
		get.Get.ResourceVersion = ""
		if o, err = c.registry.GetObject(context.Background(), get); err != nil {
			return fallback
		}
	}
	if own := o.GetAnnotations()[api.TraceParentAnnotation]; own != "" {
		return own
	}
	return fallback
}

func newUnauthorized(reason string) error {
	if reason == "" {
		reason = "Unauthorized"
	}
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusUnauthorized, Reason: metav1.StatusReasonUnauthorized,
		Message: reason,
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
