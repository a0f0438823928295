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

// chain is the pipeline. Every request passes serve, whether it came by HTTP
// (where http.go has performed stage 1) or from a caller in this process (whose
// identity the wiring gave).
type chain struct {
	name       string
	registry   *registry.Registry
	kinds      *api.Kinds
	authorizer authz.Authorizer
	rules      *authz.Follower // what the authorizer goes by
	ready      <-chan struct{} // closed once the authorizer has its rules
	mutating   admission.Mutators
	validating admission.Validators
	mutate     func(context.Context, *api.Attempt) error // by mutating, measured
	validate   func(context.Context, *api.Attempt) error // by validating, measured
	verbs      *subresource.Verbs
	timeline   *api.Timeline
	leader     func() string // may be nil
	clock      func() time.Time
	audit      *audit.Auditor // nil = nothing is recorded
}

// serve is the pipeline, stage by stage. body reads what the request carries, once
// the user is known to be allowed to send it; nil when it is there already.
func (c *chain) serve(ctx context.Context, r *api.Request, body func(context.Context) error) (endpoints.Result, error) {
	// Stage 1, authentication: the request bears its user.
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
	// Stages 3, 4 and 5 are c.Mutate and c.Validate. The registry calls them between reading
	// the stored object and committing the new one, again when the commit meets a conflict.
	// Stage 6, the registry.
	res, err := c.perform(ctx, r, c)
	if err == nil {
		c.record(r, res)
		recordAnswer(record, r, res.Object)
	}
	return res, err
}

// Mutate is stage 3, mutating admission, one plugin after the other.
func (c *chain) Mutate(ctx context.Context, a *api.Attempt) error {
	if r := a.Request; a.Creates() && (r.Verb == api.VerbPatch || r.Verb == api.VerbUpdate) {
		// An apply or an update that creates needs the right to create.
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

// identify sets apiVersion and kind of the attempt's objects where they are empty, as in objects that callers in this
// process create. Webhooks and policies decode the objects by these fields. The old object is shared, so identify
// replaces it by a copy.
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

// Validate is stage 4, the rules of the kind, and stage 5, validating admission.
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

// authorize is stage 2.
func (c *chain) authorize(ctx context.Context, r *api.Request) error {
	return c.decide(ctx, authz.Of(r), r.Stages)
}

func (c *chain) decide(ctx context.Context, a *authz.Attributes, timer *api.StageTimer) error {
	d, reason := c.judge(ctx, a)
	if d == authz.NoOpinion && !isClosed(c.ready) {
		// Rules that have not been read yet may allow it.
		if err := awaitRead(ctx, c.ready, "authorization rules"); err != nil {
			return err
		}
		d, reason = c.judge(ctx, a)
	}
	if d != authz.Allow {
		if a.User.Name == api.UserAnonymous {
			return unauthorized("Unauthorized") // it might do with credentials
		}
		api.Annotate(ctx, "authorization.k8s.io/decision", "forbid")
		api.Annotate(ctx, "authorization.k8s.io/reason", reason)
		return authz.Forbidden(a, reason)
	}
	timer.Mark("authorized", "", c.clock())
	return nil
}

// judge asks the authorizer. It refuses nobody by rules that are not the newest: who was told of a binding may use it at
// once, at every replica.
func (c *chain) judge(ctx context.Context, a *authz.Attributes) (authz.Decision, string) {
	mark := c.rules.Mark()
	d, reason := c.authorizer.Authorize(ctx, a)
	if d != authz.NoOpinion || a.User.Name == api.UserAnonymous || !isClosed(c.ready) {
		return d, reason
	}
	short, cancel := context.WithTimeout(ctx, newestRulesWait)
	defer cancel()
	// Where they cannot be had, those that are known count.
	if behind, err := c.rules.Behind(short, mark); err == nil && behind {
		d, reason = c.authorizer.Authorize(ctx, a)
	}
	return d, reason
}

// newestRulesWait is how long a refusal waits at most for the newest rules.
const newestRulesWait = time.Second

// rulesWait is how long a request waits for a replica that is starting to read its rules.
const rulesWait = 10 * time.Second

// awaitRead waits until this replica has read what a request is judged by.
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

// validateSchema is stage 4: the kind's own rules about a whole object, and
// about what may change. A facet has rules of its own.
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
	// The own rules of ephemeralcontainers refuse new ones; a binding adds none.
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

// unbuilt refuses the fields on which nothing acts, and tells the client of those that have no effect in Kubernetes
// either.
func unbuilt(ctx context.Context, a *fields.Answers, obj, old any) field.ErrorList {
	errs, warnings := a.Check(obj, old)
	for _, w := range warnings {
		api.Warn(ctx, w)
	}
	return errs
}

// validateBody is stage 4 for what is asked and not stored: the bodies of virtual kinds, tokens, bindings, evictions.
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

// perform is stage 6: each verb to the registry, or to the rules of its subresource.
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

// Watch is api.Backend and endpoints.Backend.
func (c *chain) Watch(ctx context.Context, r *api.Request) (watch.Interface, error) {
	if audit.Of(ctx) != nil { // it came by HTTP
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

// watch authorizes in the context of the record; the watch itself lives in another.
func (c *chain) watch(recorded, ctx context.Context, r *api.Request) (watch.Interface, error) {
	if r.User.Name == "" {
		return nil, unauthorized("the request names no user")
	}
	if err := c.authorize(recorded, r); err != nil {
		return nil, err
	}
	return c.registry.Watch(ctx, r)
}

// Do is api.Backend: the road of callers in this process.
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

// traced says whether a write from inside belongs to somebody's timeline: it makes
// an object that descends from a traced one, or binds a pod.
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

// record puts the stages of a committed write into the timeline, under the
// object's own trace. Reports of status are not steps of an apply.
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

// traceOf reads the trace of an object that the answer does not hold (a Binding's pod).
func (c *chain) traceOf(r *api.Request, otherwise string) string {
	get := &api.Request{Verb: api.VerbGet, Kind: r.Kind, Namespace: r.Namespace, Name: r.Name}
	get.Get.ResourceVersion = "0"
	o, err := c.registry.Get(context.Background(), get)
	if err != nil { // the cache may be a moment behind
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
