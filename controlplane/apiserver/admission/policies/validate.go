package policies

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/google/cel-go/common/types"
	arv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	celconfig "k8s.io/apiserver/pkg/apis/cel"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
	"keelson.dev/keelson/controlplane/apiserver/cel"
)

// Limits of one audit event: number of validation failures, and bytes of an audit annotation.
const (
	maxFailures   = 50
	maxAnnotation = 10 << 10
)

// denial is the rejection of an attempt by a policy, with its message.
type denial struct {
	policy, binding, message string
	reason                   metav1.StatusReason
}

func (d *denial) messageText() string {
	if d.binding == "" {
		return fmt.Sprintf("ValidatingAdmissionPolicy '%s' denied request: %s", d.policy, d.message)
	}
	return fmt.Sprintf("ValidatingAdmissionPolicy '%s' with binding '%s' denied request: %s", d.policy,
		d.binding, d.message)
}

// auditFailure is a failed validation as Kubernetes encodes it in an audit annotation.
type auditFailure struct {
	Message           string                  `json:"message"`
	Policy            string                  `json:"policy"`
	Binding           string                  `json:"binding"`
	ExpressionIndex   int                     `json:"expressionIndex"`
	ValidationActions []arv1.ValidationAction `json:"validationActions"`
}

// validation is the evaluation of one attempt by the validating policies.
type validation struct {
	*evaluator
	denials     []denial
	failures    []auditFailure
	annotations map[string][]string // audit annotations of the current policy
}

// Validate evaluates the validating policies for an attempt. It returns the first denial as an API
// error.
func (p *Policies) Validate(ctx context.Context, a *matching.Attempt) error {
	s := p.current.Load()
	if s == nil || len(s.validating) == 0 || a.Exempt() {
		return nil
	}
	v := &validation{evaluator: p.newEvaluator(ctx, a)}
	for _, b := range s.validating {
		if err := v.validateByPolicy(ctx, b); err != nil {
			return err
		}
	}
	v.auditFailures(ctx)
	if len(v.denials) == 0 {
		return nil
	}
	return v.firstDenial()
}

func (v *validation) validateByPolicy(ctx context.Context, b *boundPolicy) error {
	misconfigured := func(one *binding, err error) {
		if b.ignoresFailure() {
			return
		}
		d := denial{policy: b.name, message: "failed to configure policy: " + err.Error()}
		if one != nil {
			d.binding, d.message = one.name, "failed to configure binding: "+err.Error()
		}
		v.denials = append(v.denials, d)
	}
	t, found := v.engine.matchBindings(ctx, b, v.attempt, misconfigured)
	v.annotations = nil
	for _, one := range found {
		params, err := v.engine.findParams(ctx, b.policy, one, v.attempt.Namespace)
		if err != nil {
			misconfigured(one, err)
			continue
		}
		for _, param := range params {
			if ctx.Err() != nil {
				return apierrors.NewTimeoutError("request did not complete within requested timeout", 0)
			}
			in, err := v.newInput(ctx, t, param)
			if err != nil {
				var status apierrors.APIStatus
				if errors.As(err, &status) {
					return err
				}
				misconfigured(one, err)
				break
			}
			v.evaluatePolicy(ctx, b.policy, one, in)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(v.annotations)) {
		api.Annotate(ctx, b.name+"/"+key, strings.Join(v.annotations[key], ", "))
	}
	return nil
}

// evaluatePolicy evaluates a policy for one binding and one parameter object, which are in input.
func (v *validation) evaluatePolicy(ctx context.Context, admissionPolicy *policy, b *binding, input *cel.Input) {
	c := admissionPolicy.compiled()
	met, err := c.conditions.AreMet(ctx, input)
	if err != nil {
		v.applyActions(ctx, admissionPolicy, b, 0, verdict{err: err}, 0)
		return
	}
	if !met {
		return
	}
	e := c.scope.Evaluate(ctx, input, cel.Budget)
	for i := range admissionPolicy.validations {
		start := time.Now()
		found := v.evaluateRule(ctx, admissionPolicy, c, i, e)
		v.applyActions(ctx, admissionPolicy, b, i, found, time.Since(start))
		if errors.Is(found.err, cel.ErrBudget) {
			return
		}
	}
	e = c.scope.Evaluate(ctx, input, cel.Budget)
	for i := range admissionPolicy.annotations {
		v.addAnnotation(ctx, admissionPolicy, b, c.published[i], admissionPolicy.annotations[i].Key, e)
	}
}

// verdict is the result of one validation rule of a policy: an error, a denial message, or neither,
// which is success.
type verdict struct {
	err     error
	message string
	reason  metav1.StatusReason
}

func (v *validation) evaluateRule(
	ctx context.Context, admissionPolicy *policy, programs *programs, i int, e *cel.Evaluation,
) verdict {
	c, said := programs.main[i], admissionPolicy.validations[i]
	if c.err != nil {
		return verdict{err: c.err}
	}
	out, err := e.Eval(ctx, c.program)
	if err != nil {
		return verdict{err: err}
	}
	if out == types.True {
		return verdict{}
	}
	found := verdict{reason: metav1.StatusReasonInvalid}
	if said.Reason != nil {
		found.reason = *said.Reason
	}
	if m := programs.messages[i]; m.program != nil {
		text, err := e.Eval(ctx, m.program)
		if errors.Is(err, cel.ErrBudget) {
			return verdict{err: fmt.Errorf("failed messageExpression: %w", err)}
		}
		if err == nil {
			found.message = usableMessage(text.Value())
		}
	}
	if found.message == "" {
		found.message = strings.TrimSpace(said.Message)
	}
	if found.message == "" {
		found.message = "failed expression: " + strings.TrimSpace(said.Expression)
	}
	return found
}

// usableMessage returns the trimmed result of a messageExpression; "" if it is too long or has
// several lines.
func usableMessage(value any) string {
	text, _ := value.(string)
	text = strings.TrimSpace(text)
	if len(text) > celconfig.MaxEvaluatedMessageExpressionSizeBytes || strings.Contains(text, "\n") {
		return ""
	}
	return text
}

// applyActions performs the validation actions of the binding (Deny, Audit, Warn) for a result, and
// counts them in the metrics. i is the index of the validation in the policy.
func (v *validation) applyActions(
	ctx context.Context, admissionPolicy *policy, b *binding, i int, result verdict, duration time.Duration,
) {
	count := func(action string) {
		v.engine.metrics.validating.observeCheck(duration, admissionPolicy.name, b.name,
			errorTypeLabel(result.err), action)
	}
	if result.err != nil {
		if admissionPolicy.ignoresFailure() {
			count("allow")
			return
		}
		result.message = result.err.Error()
	}
	if result.message == "" {
		return
	}
	for _, action := range b.actions {
		switch action {
		case arv1.Deny:
			v.denials = append(v.denials, denial{admissionPolicy.name, b.name, result.message, result.reason})
			count("deny")
		case arv1.Audit:
			v.failures = append(v.failures, auditFailure{result.message, admissionPolicy.name, b.name, i, b.actions})
			count("audit")
		case arv1.Warn:
			api.Warn(ctx, fmt.Sprintf("Validation failed for ValidatingAdmissionPolicy '%s' with binding '%s': %s",
				admissionPolicy.name, b.name, result.message))
			count("warn")
		}
	}
}

// addAnnotation evaluates the expression of one audit annotation and adds its text to the
// annotations of the request. An evaluation error denies the request, unless the policy ignores
// failures.
func (v *validation) addAnnotation(
	ctx context.Context, admissionPolicy *policy, b *binding, c compiled, key string, e *cel.Evaluation,
) {
	err := c.err
	if err == nil {
		out, e := e.Eval(ctx, c.program)
		if err = e; err == nil {
			text, _ := out.Value().(string)
			text = api.Truncate(strings.TrimSpace(text), maxAnnotation)
			if v.annotations == nil {
				v.annotations = map[string][]string{}
			}
			if text != "" && !slices.Contains(v.annotations[key], text) {
				v.annotations[key] = append(v.annotations[key], text)
			}
			return
		}
	}
	if !admissionPolicy.ignoresFailure() {
		v.denials = append(v.denials, denial{policy: admissionPolicy.name, binding: b.name, message: err.Error()})
		v.engine.metrics.validating.observeCheck(0, admissionPolicy.name, b.name, errorTypeLabel(err), "deny")
	}
}

// auditFailures adds the failures of bindings with the action Audit to the audit event.
func (v *validation) auditFailures(ctx context.Context) {
	if len(v.failures) == 0 {
		return
	}
	text, err := json.Marshal(v.failures[:min(len(v.failures), maxFailures)])
	if err == nil {
		api.Annotate(ctx, "validation.policy.admission.k8s.io/validation_failure", string(text))
	}
}

// firstDenial returns the first denial as an API error.
func (v *validation) firstDenial() error {
	first := v.denials[0]
	name := v.attempt.Name
	if o, ok := v.attempt.Object.(metav1.Object); ok && name == "" {
		name = o.GetName()
	}
	message := first.messageText()
	err := apierrors.NewForbidden(v.attempt.Resource.GroupResource(), name, errors.New(message))
	if first.reason == "" {
		first.reason = metav1.StatusReasonInvalid
	}
	err.ErrStatus.Reason, err.ErrStatus.Code = first.reason, http.StatusUnprocessableEntity
	switch first.reason {
	case metav1.StatusReasonForbidden:
		err.ErrStatus.Code = http.StatusForbidden
	case metav1.StatusReasonUnauthorized:
		err.ErrStatus.Code = http.StatusUnauthorized
	case metav1.StatusReasonRequestEntityTooLarge:
		err.ErrStatus.Code = http.StatusRequestEntityTooLarge
	}
	err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes, metav1.StatusCause{Message: message})
	return err
}
