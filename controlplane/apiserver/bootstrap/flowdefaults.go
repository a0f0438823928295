package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap"

	"keelson.dev/keelson/controlplane/api"
)

// flowDefault is a FlowSchema or PriorityLevelConfiguration that every cluster has.
type flowDefault struct {
	api.Object
	// mandatory is true for objects that always have the spec of Kubernetes. Other objects keep a
	// spec that a user has changed.
	mandatory bool
}

// allFlowDefaults returns all default objects of flow control. PriorityLevelConfigurations come
// before the FlowSchemas that reference them.
func allFlowDefaults() (out []flowDefault) {
	for _, l := range bootstrap.MandatoryPriorityLevelConfigurations {
		// The lendable share of the exempt level may be changed.
		out = append(out, flowDefault{l, l.Name != flowcontrolv1.PriorityLevelConfigurationNameExempt})
	}
	for _, l := range bootstrap.SuggestedPriorityLevelConfigurations {
		out = append(out, flowDefault{l, false})
	}
	for _, f := range bootstrap.MandatoryFlowSchemas {
		out = append(out, flowDefault{f, true})
	}
	for _, f := range bootstrap.SuggestedFlowSchemas {
		out = append(out, flowDefault{f, false})
	}
	return out
}

// EnsureFlowControl creates the default FlowSchemas and PriorityLevelConfigurations that are
// missing. It restores the specs of existing ones, unless a user has changed them intentionally
// (see followsDefault), and deletes defaults of earlier releases. It also sets the Dangling
// condition of each FlowSchema.
func (s *Setup) EnsureFlowControl(ctx context.Context, fence uint64) error {
	if err := s.config.Registry.CaughtUp(ctx); err != nil {
		return err
	}
	var errs []error
	wanted := map[string]bool{}
	for _, d := range allFlowDefaults() {
		kind, err := s.servedKindOf(d.Object)
		if err != nil || kind == nil {
			return err
		}
		wanted[kind.Resource+"/"+d.GetName()] = true
		errs = append(errs, s.ensureFlowDefault(ctx, fence, kind.Resource, d))
	}
	levels := map[string]bool{}
	for _, resource := range []string{"prioritylevelconfigurations", "flowschemas"} {
		all, err := s.config.Cluster.List(ctx, resource, "", true)
		if err != nil {
			return errors.Join(append(errs, fmt.Errorf("listing %s: %w", resource, err))...)
		}
		for _, o := range all {
			switch schema, ok := o.(*flowcontrolv1.FlowSchema); {
			case !wanted[resource+"/"+o.GetName()] && o.GetDeletionTimestamp() == nil && keptByCluster(o):
				if err := s.writeObject(ctx, fence, api.VerbDelete, o); !apierrors.IsNotFound(err) {
					errs = append(errs, err)
				}
			case ok:
				errs = append(errs, s.setDanglingCondition(ctx, fence, schema,
					levels[schema.Spec.PriorityLevelConfiguration.Name]))
			default:
				levels[o.GetName()] = true
			}
		}
	}
	return errors.Join(errs...)
}

// ensureFlowDefault creates one default object or restores its spec and auto-update annotation.
// After a conflict it returns nil, because the next call of EnsureFlowControl tries again.
func (s *Setup) ensureFlowDefault(ctx context.Context, fence uint64, resource string, d flowDefault) error {
	found, ok := s.config.Cluster.Get(ctx, resource, "", d.GetName())
	if !ok {
		err := s.writeObject(ctx, fence, api.VerbCreate, d.DeepCopyObject().(api.Object))
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return err
	}
	next := found.DeepCopyObject().(api.Object)
	takenOver := !d.mandatory && !followsDefault(found)
	annotations := next.GetAnnotations()
	if was, err := strconv.ParseBool(annotations[flowcontrolv1.AutoUpdateAnnotationKey]); err != nil ||
		was == takenOver {
		if annotations == nil {
			annotations = map[string]string{}
		}
		annotations[flowcontrolv1.AutoUpdateAnnotationKey] = strconv.FormatBool(!takenOver)
		next.SetAnnotations(annotations)
	}
	if !takenOver {
		copyFlowSpec(next, d.Object)
	}
	if equality.Semantic.DeepEqual(found, next) {
		return nil
	}
	if err := s.writeObject(ctx, fence, api.VerbUpdate, next); err != nil && !apierrors.IsConflict(err) &&
		!apierrors.IsNotFound(err) {
		return err
	}
	return nil
}

// followsDefault reports whether an object that is not mandatory keeps the default spec. The
// auto-update annotation decides. Without the annotation, it reports whether the spec is unchanged
// since creation (generation 1).
func followsDefault(o metav1.Object) bool {
	follows, err := strconv.ParseBool(o.GetAnnotations()[flowcontrolv1.AutoUpdateAnnotationKey])
	if err != nil {
		return o.GetGeneration() == 1
	}
	return follows
}

// keptByCluster reports whether the auto-update annotation of an object is true: the cluster
// created the object, and no user has set the annotation to false.
func keptByCluster(o metav1.Object) bool {
	kept, err := strconv.ParseBool(o.GetAnnotations()[flowcontrolv1.AutoUpdateAnnotationKey])
	return err == nil && kept
}

func copyFlowSpec(target, source api.Object) {
	switch into := target.(type) {
	case *flowcontrolv1.FlowSchema:
		into.Spec = *source.(*flowcontrolv1.FlowSchema).Spec.DeepCopy()
	case *flowcontrolv1.PriorityLevelConfiguration:
		into.Spec = *source.(*flowcontrolv1.PriorityLevelConfiguration).Spec.DeepCopy()
	}
}

// setDanglingCondition sets the Dangling condition of a FlowSchema. exists reports whether its
// PriorityLevelConfiguration exists.
func (s *Setup) setDanglingCondition(
	ctx context.Context, fence uint64, flowSchema *flowcontrolv1.FlowSchema, exists bool,
) error {
	want := flowcontrolv1.FlowSchemaCondition{Type: flowcontrolv1.FlowSchemaConditionDangling,
		Status: flowcontrolv1.ConditionTrue, Reason: "NotFound", LastTransitionTime: metav1.NewTime(s.config.Clock())}
	is := "but there is no such object"
	if exists {
		want.Status, want.Reason, is = flowcontrolv1.ConditionFalse, "Found", "and it exists"
	}
	want.Message = fmt.Sprintf("This FlowSchema references the PriorityLevelConfiguration object named %q %s",
		flowSchema.Spec.PriorityLevelConfiguration.Name, is)
	next := flowSchema.DeepCopy()
	at := -1
	for i, c := range next.Status.Conditions {
		if c.Type != want.Type {
			continue
		}
		if at = i; c.Status == want.Status && c.Reason == want.Reason && c.Message == want.Message {
			return nil
		}
	}
	if at < 0 {
		next.Status.Conditions = append(next.Status.Conditions, want)
	} else {
		next.Status.Conditions[at] = want
	}
	kind, err := s.servedKindOf(flowSchema)
	if err != nil {
		return err
	}
	_, err = s.config.Backend.Do(ctx, &api.Request{User: api.APIServerUser(), Verb: api.VerbUpdate, Kind: kind,
		Subresource: "status",
		Name:        flowSchema.Name, Object: next, Internal: api.InternalOptions{Fence: fence}})
	if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
		return fmt.Errorf("writing the status of flow schema %s: %w", flowSchema.Name, err)
	}
	return nil
}
