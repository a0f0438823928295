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

// Limits of the failures and annotations in an audit event.
const (
	maxFailures   = 50
	maxAnnotation = 10 << 10
)

// denied is a denial by a policy, with its message.
type denied struct {
	policy, binding, message string
	reason                   metav1.StatusReason
}

func (d *denied) text() string {
	if d.binding == "" {
		return fmt.Sprintf("ValidatingAdmissionPolicy '%s' denied request: %s", d.policy, d.message)
	}
	return fmt.Sprintf("ValidatingAdmissionPolicy '%s' with binding '%s' denied request: %s", d.policy, d.binding, d.message)
}

// failed is a failed validation in the form of an audit annotation.
type failed struct {
	Message           string                  `json:"message"`
	Policy            string                  `json:"policy"`
	Binding           string                  `json:"binding"`
	ExpressionIndex   int                     `json:"expressionIndex"`
	ValidationActions []arv1.ValidationAction `json:"validationActions"`
}

// validation is the evaluation of one attempt by the validating policies.
type validation struct {
	*evaluator
	denials  []denied
	failures []failed
	notes    map[string][]string // audit annotations of the current policy
}

// Validate evaluates the validating policies for an attempt. It returns the first denial.
func (p *Policies) Validate(ctx context.Context, a *matching.Attempt) error {
	s := p.now.Load()
	if s == nil || len(s.validating) == 0 || a.Exempt() {
		return nil
	}
	v := &validation{evaluator: p.evaluator(ctx, a)}
	for _, b := range s.validating {
		if err := v.policy(ctx, b); err != nil {
			return err
		}
	}
	v.audit(ctx)
	if len(v.denials) == 0 {
		return nil
	}
	return v.refusal()
}

func (v *validation) policy(ctx context.Context, b *bound) error {
	misconfigured := func(one *binding, err error) {
		if b.ignores() {
			return
		}
		d := denied{policy: b.name, message: "failed to configure policy: " + err.Error()}
		if one != nil {
			d.binding, d.message = one.name, "failed to configure binding: "+err.Error()
		}
		v.denials = append(v.denials, d)
	}
	t, found := v.of.about(ctx, b, v.attempt, misconfigured)
	v.notes = nil
	for _, one := range found {
		params, err := v.of.params(ctx, b.policy, one, v.attempt.Namespace)
		if err != nil {
			misconfigured(one, err)
			continue
		}
		for _, param := range params {
			if ctx.Err() != nil {
				return apierrors.NewTimeoutError("request did not complete within requested timeout", 0)
			}
			in, err := v.input(ctx, t, param)
			if err != nil {
				var status apierrors.APIStatus
				if errors.As(err, &status) {
					return err
				}
				misconfigured(one, err)
				break
			}
			v.evaluate(ctx, b.policy, one, in)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(v.notes)) {
		api.Annotate(ctx, b.name+"/"+key, strings.Join(v.notes[key], ", "))
	}
	return nil
}

// evaluate evaluates a policy for one binding and parameter.
func (v *validation) evaluate(ctx context.Context, p *policy, b *binding, in *cel.Input) {
	c := p.compiled()
	met, err := c.conditions.Met(ctx, in)
	if err != nil {
		v.decide(ctx, p, b, 0, verdict{err: err}, 0)
		return
	}
	if !met {
		return
	}
	e := c.scope.Evaluate(ctx, in, cel.Budget)
	for i := range p.validations {
		start := time.Now()
		found := v.validate(ctx, p, c, i, e)
		v.decide(ctx, p, b, i, found, time.Since(start))
		if errors.Is(found.err, cel.ErrBudget) {
			return
		}
	}
	e = c.scope.Evaluate(ctx, in, cel.Budget)
	for i := range p.annotations {
		v.annotate(ctx, p, b, c.published[i], p.annotations[i].Key, e)
	}
}

// verdict is the result of one validation: an error, a denial message, or success.
type verdict struct {
	err     error
	message string
	reason  metav1.StatusReason
}

func (v *validation) validate(ctx context.Context, p *policy, of *programs, i int, e *cel.Evaluation) verdict {
	c, said := of.main[i], p.validations[i]
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
	if m := of.messages[i]; m.program != nil {
		text, err := e.Eval(ctx, m.program)
		if errors.Is(err, cel.ErrBudget) {
			return verdict{err: fmt.Errorf("failed messageExpression: %w", err)}
		}
		if err == nil {
			found.message = usable(text.Value())
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

// usable returns the trimmed result of a messageExpression; "" if it is too long or has several
// lines.
func usable(value any) string {
	text, _ := value.(string)
	text = strings.TrimSpace(text)
	if len(text) > celconfig.MaxEvaluatedMessageExpressionSizeBytes || strings.Contains(text, "\n") {
		return ""
	}
	return text
}

// decide performs the validation actions of the binding for a verdict.
func (v *validation) decide(ctx context.Context, p *policy, b *binding, i int, found verdict, took time.Duration) {
	count := func(action string) {
		v.of.metrics.validating.observe(took, p.name, b.name, errorType(found.err), action)
	}
	if found.err != nil {
		if p.ignores() {
			count("allow")
			return
		}
		found.message = found.err.Error()
	}
	if found.message == "" {
		return
	}
	for _, action := range b.actions {
		switch action {
		case arv1.Deny:
			v.denials = append(v.denials, denied{p.name, b.name, found.message, found.reason})
			count("deny")
		case arv1.Audit:
			v.failures = append(v.failures, failed{found.message, p.name, b.name, i, b.actions})
			count("audit")
		case arv1.Warn:
			api.Warn(ctx, fmt.Sprintf("Validation failed for ValidatingAdmissionPolicy '%s' with binding '%s': %s",
				p.name, b.name, found.message))
			count("warn")
		}
	}
}

// annotate evaluates one audit annotation. An evaluation error is a denial, unless the policy
// ignores failures.
func (v *validation) annotate(ctx context.Context, p *policy, b *binding, c compiled, key string, e *cel.Evaluation) {
	err := c.err
	if err == nil {
		out, e := e.Eval(ctx, c.program)
		if err = e; err == nil {
			text, _ := out.Value().(string)
			text = api.Clip(strings.TrimSpace(text), maxAnnotation)
			if v.notes == nil {
				v.notes = map[string][]string{}
			}
			if text != "" && !slices.Contains(v.notes[key], text) {
				v.notes[key] = append(v.notes[key], text)
			}
			return
		}
	}
	if !p.ignores() {
		v.denials = append(v.denials, denied{policy: p.name, binding: b.name, message: err.Error()})
		v.of.metrics.validating.observe(0, p.name, b.name, errorType(err), "deny")
	}
}

// audit adds the failures with the action Audit to the audit event.
func (v *validation) audit(ctx context.Context) {
	if len(v.failures) == 0 {
		return
	}
	text, err := json.Marshal(v.failures[:min(len(v.failures), maxFailures)])
	if err == nil {
		api.Annotate(ctx, "validation.policy.admission.k8s.io/validation_failure", string(text))
	}
}

// refusal returns the first denial as an API error.
func (v *validation) refusal() error {
	first := v.denials[0]
	name := v.attempt.Name
	if o, ok := v.attempt.Object.(metav1.Object); ok && name == "" {
		name = o.GetName()
	}
	message := first.text()
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
