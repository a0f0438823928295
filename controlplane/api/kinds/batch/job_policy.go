package batch

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

const (
	maxFailureRules      = 20
	maxFailureExitCodes  = 255
	maxFailureConditions = 20
	maxSuccessRules      = 20
	maxIndexesText       = 64 * 1024
)

func validateFailurePolicy(s *batchv1.JobSpec, fldPath *field.Path) field.ErrorList {
	rules := fldPath.Child("rules")
	var errs field.ErrorList
	if n := len(s.PodFailurePolicy.Rules); n > maxFailureRules {
		errs = append(errs, field.TooMany(rules, n, maxFailureRules))
	}
	for i := range s.PodFailurePolicy.Rules {
		errs = append(errs, validateFailureRule(s, &s.PodFailurePolicy.Rules[i], rules.Index(i))...)
	}
	return errs
}

func validateFailureRule(s *batchv1.JobSpec, r *batchv1.PodFailurePolicyRule, fldPath *field.Path) field.ErrorList {
	errs := fieldrules.ValidateRequiredValue(r.Action, fldPath.Child("action"), batchv1.PodFailurePolicyActionCount,
		batchv1.PodFailurePolicyActionFailIndex,
		batchv1.PodFailurePolicyActionFailJob, batchv1.PodFailurePolicyActionIgnore)
	if r.Action == batchv1.PodFailurePolicyActionFailIndex && s.BackoffLimitPerIndex == nil {
		errs = append(errs, field.Invalid(fldPath.Child("action"), r.Action,
			"requires the backoffLimitPerIndex to be set"))
	}
	if r.OnExitCodes != nil {
		errs = append(errs, validateExitCodes(s, r.OnExitCodes, fldPath.Child("onExitCodes"))...)
	}
	here := fldPath.Child("onPodConditions")
	if n := len(r.OnPodConditions); n > maxFailureConditions {
		errs = append(errs, field.TooMany(here, n, maxFailureConditions))
	}
	for i, p := range r.OnPodConditions {
		errs = append(errs, fieldrules.InvalidErrors(here.Index(i).Child("type"), p.Type,
			utilvalidation.IsQualifiedName(string(p.Type)))...)
		errs = append(errs, fieldrules.ValidateRequiredValue(p.Status, here.Index(i).Child("status"),
			corev1.ConditionFalse, corev1.ConditionTrue, corev1.ConditionUnknown)...)
	}
	switch conditions := len(r.OnPodConditions) > 0; {
	case r.OnExitCodes != nil && conditions:
		errs = append(errs, field.Invalid(fldPath, field.OmitValueType{},
			"specifying both OnExitCodes and OnPodConditions is not supported"))
	case r.OnExitCodes == nil && !conditions:
		errs = append(errs, field.Invalid(fldPath, field.OmitValueType{},
			"specifying one of OnExitCodes and OnPodConditions is required"))
	}
	return errs
}

func validateExitCodes(
	s *batchv1.JobSpec, r *batchv1.PodFailurePolicyOnExitCodesRequirement, fldPath *field.Path,
) field.ErrorList {
	errs := fieldrules.ValidateRequiredValue(r.Operator, fldPath.Child("operator"),
		batchv1.PodFailurePolicyOnExitCodesOpIn,
		batchv1.PodFailurePolicyOnExitCodesOpNotIn)
	if n := r.ContainerName; n != nil {
		called := func(c corev1.Container) bool { return c.Name == *n }
		if !slices.ContainsFunc(s.Template.Spec.Containers, called) &&
			!slices.ContainsFunc(s.Template.Spec.InitContainers, called) {
			errs = append(errs, field.Invalid(fldPath.Child("containerName"), *n,
				"must be one of the container or initContainer names in the pod template"))
		}
	}
	fldPath = fldPath.Child("values")
	switch n := len(r.Values); {
	case n == 0:
		errs = append(errs, field.Invalid(fldPath, r.Values, "at least one value is required"))
	case n > maxFailureExitCodes:
		return append(errs, field.TooMany(fldPath, n, maxFailureExitCodes))
	}
	for i, code := range r.Values {
		if r.Operator == batchv1.PodFailurePolicyOnExitCodesOpIn && code == 0 {
			errs = append(errs, field.Invalid(fldPath.Index(i), code, "must not be 0 for the In operator"))
		}
		if slices.Contains(r.Values[:i], code) {
			errs = append(errs, field.Duplicate(fldPath.Index(i), code))
		}
	}
	if !slices.IsSorted(r.Values) {
		errs = append(errs, field.Invalid(fldPath, r.Values, "must be ordered"))
	}
	return errs
}

func validateSuccessPolicy(s *batchv1.JobSpec, fldPath *field.Path) field.ErrorList {
	fldPath = fldPath.Child("rules")
	var errs field.ErrorList
	switch n := len(s.SuccessPolicy.Rules); {
	case n == 0:
		errs = append(errs, field.Required(fldPath,
			"at least one rules must be specified when the successPolicy is specified"))
	case n > maxSuccessRules:
		errs = append(errs, field.TooMany(fldPath, n, maxSuccessRules))
	}
	for i := range s.SuccessPolicy.Rules {
		errs = append(errs, validateSuccessRule(ptr.Deref(s.Completions, 0), &s.SuccessPolicy.Rules[i],
			fldPath.Index(i))...)
	}
	return errs
}

func validateSuccessRule(completions int32, r *batchv1.SuccessPolicyRule, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if r.SucceededCount == nil && r.SucceededIndexes == nil {
		errs = append(errs, field.Required(fldPath,
			"at least one of succeededCount or succeededIndexes must be specified"))
	}
	total := int32(0)
	if text := r.SucceededIndexes; text != nil {
		here := fldPath.Child("succeededIndexes")
		if len(*text) > maxIndexesText {
			errs = append(errs, field.TooLong(here, *text, maxIndexesText))
		}
		var err error
		if total, err = countIndexes(*text, completions); err != nil {
			errs = append(errs, field.Invalid(here, *text, "error parsing succeededIndexes: "+err.Error()))
		}
	}
	if n := r.SucceededCount; n != nil {
		here := fldPath.Child("succeededCount")
		errs = append(errs, fieldrules.ValidateNonNegative(*n, here)...)
		if *n > completions {
			errs = append(errs, field.Invalid(here, *n,
				fmt.Sprintf("must be less than or equal to %d (the number of specified completions)", completions)))
		}
		if r.SucceededIndexes != nil && *n > total {
			errs = append(errs, field.Invalid(here, *n,
				fmt.Sprintf("must be less than or equal to %d (the number of indexes in the specified "+
					"succeededIndexes field)", total)))
		}
	}
	return errs
}

// countIndexes returns the number of indexes in a list such as "1,3-5". The indexes must be
// ascending and below completions.
func countIndexes(text string, completions int32) (int32, error) {
	total, last := int32(0), int32(-1)
	for part := range strings.SplitSeq(text, ",") {
		if text == "" {
			break
		}
		from, to, err := parseIndexInterval(part, completions)
		if err != nil {
			return 0, err
		}
		if last >= from {
			return 0, fmt.Errorf("non-increasing order, previous: %d, current: %d", last, from)
		}
		total, last = total+to-from+1, to
	}
	return total, nil
}

// parseIndexInterval parses one element of an index list: "3" or "3-5".
func parseIndexInterval(text string, completions int32) (first, last int32, err error) {
	ends := strings.Split(text, "-")
	if len(ends) > 2 {
		return 0, 0,
			fmt.Errorf("the fragment %q violates the requirement that an index interval can have at most two parts "+
				"separated by '-'", text)
	}
	var read [2]int32
	for i, end := range ends {
		n, err := strconv.Atoi(end)
		switch {
		case err != nil:
			return 0, 0, fmt.Errorf("cannot convert string to integer for index: %q", end)
		case n >= int(completions):
			return 0, 0, fmt.Errorf("too large index: %q", end)
		}
		read[i] = int32(n)
	}
	if len(ends) == 1 {
		return read[0], read[0], nil
	}
	if read[0] >= read[1] {
		return 0, 0, fmt.Errorf("non-increasing order, previous: %d, current: %d", read[0], read[1])
	}
	return read[0], read[1], nil
}

// countOverlap returns an index that two index lists have in common, or -1 if the lists have no
// common index. Malformed elements are ignored.
func countOverlap(a, b string, completions int32) int32 {
	var spans [][2]int32
	for part := range strings.SplitSeq(a, ",") {
		if from, to, err := parseIndexInterval(part, completions); err == nil {
			spans = append(spans, [2]int32{from, to})
		}
	}
	i := 0
	for part := range strings.SplitSeq(b, ",") {
		from, to, err := parseIndexInterval(part, completions)
		if err != nil {
			continue
		}
		for i < len(spans) && spans[i][1] < from {
			i++
		}
		if i < len(spans) && spans[i][0] <= to {
			return max(spans[i][0], from)
		}
	}
	return -1
}
