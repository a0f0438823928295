package apiserver

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
	// mandatory objects always have the spec of Kubernetes. Other objects keep a spec that a user
	// has changed.
	mandatory bool
}

// flowDefaults returns all of them. PriorityLevelConfigurations come before the FlowSchemas that
// reference them.
func flowDefaults() (out []flowDefault) {
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
// missing. It restores their specs, unless a user has taken an object over, and deletes defaults of
// earlier releases. It also sets each FlowSchema's Dangling condition.
func (s *Server) EnsureFlowControl(ctx context.Context, fence uint64) error {
	if err := s.cfg.Registry.CaughtUp(ctx); err != nil {
		return err
	}
	var errs []error
	wanted := map[string]bool{}
	for _, d := range flowDefaults() {
		kind, err := s.kindOf(d.Object)
		if err != nil || kind == nil {
			return err
		}
		wanted[kind.Resource+"/"+d.GetName()] = true
		errs = append(errs, s.ensureFlowDefault(ctx, fence, kind.Resource, d))
	}
	levels := map[string]bool{}
	for _, resource := range []string{"prioritylevelconfigurations", "flowschemas"} {
		all, err := s.known.List(ctx, resource, "", true)
		if err != nil {
			return errors.Join(append(errs, fmt.Errorf("listing %s: %w", resource, err))...)
		}
		for _, o := range all {
			switch schema, ok := o.(*flowcontrolv1.FlowSchema); {
			case !wanted[resource+"/"+o.GetName()] && o.GetDeletionTimestamp() == nil && keptByCluster(o):
				if err := s.write(ctx, fence, api.VerbDelete, o); !apierrors.IsNotFound(err) {
					errs = append(errs, err)
				}
			case ok:
				errs = append(errs, s.tellLevel(ctx, fence, schema, levels[schema.Spec.PriorityLevelConfiguration.Name]))
			default:
				levels[o.GetName()] = true
			}
		}
	}
	return errors.Join(errs...)
}

// ensureFlowDefault creates one default object or restores its spec and auto-update annotation.
// After a conflict it returns nil; the next call of EnsureFlowControl repeats it.
func (s *Server) ensureFlowDefault(ctx context.Context, fence uint64, resource string, d flowDefault) error {
	found, ok := s.known.Get(ctx, resource, "", d.GetName())
	if !ok {
		err := s.write(ctx, fence, api.VerbCreate, d.DeepCopyObject().(api.Object))
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return err
	}
	next := found.DeepCopyObject().(api.Object)
	takenOver := !d.mandatory && !followsDefault(found)
	annotations := next.GetAnnotations()
	if was, err := strconv.ParseBool(annotations[flowcontrolv1.AutoUpdateAnnotationKey]); err != nil || was == takenOver {
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
	if err := s.write(ctx, fence, api.VerbUpdate, next); err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
		return err
	}
	return nil
}

// followsDefault reports whether a suggested object keeps the default spec. The auto-update
// annotation decides. Without the annotation, it reports whether the spec is unchanged since
// creation (generation 1).
func followsDefault(o metav1.Object) bool {
	follows, err := strconv.ParseBool(o.GetAnnotations()[flowcontrolv1.AutoUpdateAnnotationKey])
	if err != nil {
		return o.GetGeneration() == 1
	}
	return follows
}

// keptByCluster reports whether the auto-update annotation of an object is true: the cluster
// created it and no user has taken it over.
func keptByCluster(o metav1.Object) bool {
	kept, err := strconv.ParseBool(o.GetAnnotations()[flowcontrolv1.AutoUpdateAnnotationKey])
	return err == nil && kept
}

func copyFlowSpec(into, from api.Object) {
	switch into := into.(type) {
	case *flowcontrolv1.FlowSchema:
		into.Spec = *from.(*flowcontrolv1.FlowSchema).Spec.DeepCopy()
	case *flowcontrolv1.PriorityLevelConfiguration:
		into.Spec = *from.(*flowcontrolv1.PriorityLevelConfiguration).Spec.DeepCopy()
	}
}

// tellLevel sets the Dangling condition of a FlowSchema. exists reports whether its
// PriorityLevelConfiguration exists.
func (s *Server) tellLevel(ctx context.Context, fence uint64, f *flowcontrolv1.FlowSchema, exists bool) error {
	want := flowcontrolv1.FlowSchemaCondition{Type: flowcontrolv1.FlowSchemaConditionDangling,
		Status: flowcontrolv1.ConditionTrue, Reason: "NotFound", LastTransitionTime: metav1.NewTime(s.cfg.Clock())}
	is := "but there is no such object"
	if exists {
		want.Status, want.Reason, is = flowcontrolv1.ConditionFalse, "Found", "and it exists"
	}
	want.Message = fmt.Sprintf("This FlowSchema references the PriorityLevelConfiguration object named %q %s",
		f.Spec.PriorityLevelConfiguration.Name, is)
	next := f.DeepCopy()
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
	kind, err := s.kindOf(f)
	if err != nil {
		return err
	}
	_, err = s.Backend().Do(ctx, &api.Request{User: itself(), Verb: api.VerbUpdate, Kind: kind, Subresource: "status",
		Name: f.Name, Object: next, Fence: fence})
	if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
		return fmt.Errorf("writing the status of flow schema %s: %w", f.Name, err)
	}
	return nil
}
