package flowcontrol

import (
	"fmt"
	"math"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// Defaults and limits of a priority level.
const (
	defaultShares      = 30
	defaultQueues      = 64
	defaultHandSize    = 8
	defaultQueueLength = 50
	maxQueues          = 10_000_000
	// maxHashBits is the number of bits of a flow's hash that shuffle sharding can use.
	maxHashBits = 60
)

// PriorityLevelKind returns the definition of the kind PriorityLevelConfiguration.
func PriorityLevelKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: flowcontrolv1.SchemeGroupVersion, Kind: "PriorityLevelConfiguration",
		Plural:   "prioritylevelconfigurations",
		Singular: "prioritylevelconfiguration", ClusterScoped: true,
	}, func(l *flowcontrolv1.PriorityLevelConfigurationList) *[]flowcontrolv1.PriorityLevelConfiguration {
		return &l.Items
	})
	k.Writes.Default = builder.Default(defaultPriorityLevel)
	builder.SeparateStatus(k,
		func(o *flowcontrolv1.PriorityLevelConfiguration) *flowcontrolv1.PriorityLevelConfigurationStatus {
			return &o.Status
		}, builder.Accessors[*flowcontrolv1.PriorityLevelConfiguration]{
			Spec:     func(p *flowcontrolv1.PriorityLevelConfiguration) any { return p.Spec },
			CopySpec: func(obj, old *flowcontrolv1.PriorityLevelConfiguration) { obj.Spec = *old.Spec.DeepCopy() },
			Status: func(obj, old *flowcontrolv1.PriorityLevelConfiguration) {
				obj.Status = flowcontrolv1.PriorityLevelConfigurationStatus{}
				if old != nil {
					obj.Status = *old.Status.DeepCopy()
				}
			},
		})
	builder.AddValidation(k, func(p *flowcontrolv1.PriorityLevelConfiguration) field.ErrorList {
		spec := field.NewPath("spec")
		errs := validatePriorityLevel(p.Name, &p.Spec, spec)
		if p.Name == flowcontrolv1.PriorityLevelConfigurationNameCatchAll && !fieldrules.SemanticEqual(p.Spec,
			CatchAllLevel()) {
			errs = append(errs, field.Invalid(spec, p.Spec,
				fmt.Sprintf("spec of '%s' must equal the fixed value", p.Name)))
		}
		// only the lendable shares of the exempt level may be changed
		fixed := p.Spec.Type == flowcontrolv1.PriorityLevelEnablementExempt && p.Spec.Limited == nil
		if p.Name == flowcontrolv1.PriorityLevelConfigurationNameExempt && !fixed {
			errs = append(errs, field.Invalid(spec, p.Spec,
				fmt.Sprintf("spec of '%s' except the 'spec.exempt' field must equal the fixed value", p.Name)))
		}
		return errs
	})
	builder.AddStatusValidation(k, func(obj, _ *flowcontrolv1.PriorityLevelConfiguration) field.ErrorList {
		types := make([]string, len(obj.Status.Conditions))
		for i, c := range obj.Status.Conditions {
			types[i] = string(c.Type)
		}
		return validateFlowConditions(types)
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Type"),
		builder.StringColumn("NominalConcurrencyShares"), builder.StringColumn("Queues"),
		builder.StringColumn("HandSize"), builder.StringColumn("QueueLengthLimit"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(p *flowcontrolv1.PriorityLevelConfiguration, now time.Time) []any {
		shares, queues, hand, length := any(builder.None), any(builder.None), any(builder.None), any(builder.None)
		if l := p.Spec.Limited; l != nil {
			shares = ptr.Deref(l.NominalConcurrencyShares, 0)
			if q := l.LimitResponse.Queuing; q != nil {
				queues, hand, length = q.Queues, q.HandSize, q.QueueLengthLimit
			}
		}
		return []any{p.Name, string(p.Spec.Type), shares, queues, hand, length, builder.Age(p, now)}
	})
	return k
}

func defaultPriorityLevel(p *flowcontrolv1.PriorityLevelConfiguration) {
	if e := p.Spec.Exempt; e != nil {
		builder.SetDefaultPtr(&e.NominalConcurrencyShares, 0)
		builder.SetDefaultPtr(&e.LendablePercent, 0)
	}
	if l := p.Spec.Limited; l != nil {
		builder.SetDefaultPtr(&l.NominalConcurrencyShares, defaultShares)
		builder.SetDefaultPtr(&l.LendablePercent, 0)
		if q := l.LimitResponse.Queuing; q != nil {
			builder.SetDefault(&q.Queues, defaultQueues)
			builder.SetDefault(&q.HandSize, defaultHandSize)
			builder.SetDefault(&q.QueueLengthLimit, defaultQueueLength)
		}
	}
}

// CatchAllLevel returns the required spec of the priority level "catch-all", which every cluster
// has.
func CatchAllLevel() flowcontrolv1.PriorityLevelConfigurationSpec {
	shares, lend := int32(5), int32(0)
	return flowcontrolv1.PriorityLevelConfigurationSpec{
		Type: flowcontrolv1.PriorityLevelEnablementLimited,
		Limited: &flowcontrolv1.LimitedPriorityLevelConfiguration{NominalConcurrencyShares: &shares,
			LendablePercent: &lend,
			LimitResponse:   flowcontrolv1.LimitResponse{Type: flowcontrolv1.LimitResponseTypeReject}},
	}
}

func validatePriorityLevel(
	name string, s *flowcontrolv1.PriorityLevelConfigurationSpec, spec *field.Path,
) field.ErrorList {
	var errs field.ErrorList
	exempt := s.Type == flowcontrolv1.PriorityLevelEnablementExempt
	if (name == flowcontrolv1.PriorityLevelConfigurationNameExempt) != exempt {
		errs = append(errs, field.Invalid(spec.Child("type"), s.Type,
			"type must be 'Exempt' if and only if name is 'exempt'"))
	}
	switch s.Type {
	case flowcontrolv1.PriorityLevelEnablementExempt:
		if s.Limited != nil {
			errs = append(errs, field.Forbidden(spec.Child("limited"), "must be nil if the type is not Limited"))
		}
		if e := s.Exempt; e != nil {
			errs = append(errs, validateShares(e.NominalConcurrencyShares, e.LendablePercent, spec.Child("exempt"))...)
		}
	case flowcontrolv1.PriorityLevelEnablementLimited:
		if s.Exempt != nil {
			errs = append(errs, field.Forbidden(spec.Child("exempt"), "must be nil if the type is Limited"))
		}
		if s.Limited == nil {
			return append(errs, field.Required(spec.Child("limited"), "must not be empty when type is Limited"))
		}
		errs = append(errs, validateLimited(s.Limited, spec.Child("limited"))...)
	default:
		errs = append(errs, fieldrules.ValidateSupported(s.Type, spec.Child("type"),
			flowcontrolv1.PriorityLevelEnablementExempt, flowcontrolv1.PriorityLevelEnablementLimited)...)
	}
	return errs
}

// validateShares validates the concurrency shares of a priority level and the percentage that it
// lends.
func validateShares(shares, lendable *int32, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if ptr.Deref(shares, 0) < 0 {
		errs = append(errs, field.Invalid(fldPath.Child("nominalConcurrencyShares"), *shares,
			"must be a non-negative integer"))
	}
	if p := ptr.Deref(lendable, 0); p < 0 || p > 100 {
		errs = append(errs, field.Invalid(fldPath.Child("lendablePercent"), p, "must be between 0 and 100, inclusive"))
	}
	return errs
}

func validateLimited(l *flowcontrolv1.LimitedPriorityLevelConfiguration, fldPath *field.Path) field.ErrorList {
	errs := validateShares(l.NominalConcurrencyShares, l.LendablePercent, fldPath)
	if b := ptr.Deref(l.BorrowingLimitPercent, 0); b < 0 {
		errs = append(errs, field.Invalid(fldPath.Child("borrowingLimitPercent"), b,
			"if specified, must be a non-negative integer"))
	}
	response := fldPath.Child("limitResponse")
	q, queuing := l.LimitResponse.Queuing, response.Child("queuing")
	switch l.LimitResponse.Type {
	case flowcontrolv1.LimitResponseTypeReject:
		if q != nil {
			errs = append(errs, field.Forbidden(queuing, "must be nil if limited.limitResponse.type is not Limited"))
		}
	case flowcontrolv1.LimitResponseTypeQueue:
		if q == nil {
			return append(errs, field.Required(queuing, "must not be empty if limited.limitResponse.type is Limited"))
		}
		errs = append(errs, validateQueuing(q, queuing)...)
	default:
		errs = append(errs, fieldrules.ValidateSupported(l.LimitResponse.Type, response.Child("type"),
			flowcontrolv1.LimitResponseTypeQueue, flowcontrolv1.LimitResponseTypeReject)...)
	}
	return errs
}

// validateQueuing validates the queues of a priority level. Shuffle sharding selects a flow's
// queues by its hash, so the hash must have enough bits for the number of queues and the hand size.
func validateQueuing(q *flowcontrolv1.QueuingConfiguration, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	wrong := func(name string, v int32, why string) {
		errs = append(errs, field.Invalid(fldPath.Child(name), v, why))
	}
	if q.QueueLengthLimit <= 0 {
		wrong("queueLengthLimit", q.QueueLengthLimit, "must be positive")
	}
	if q.Queues <= 0 {
		wrong("queues", q.Queues, "must be positive")
	} else if q.Queues > maxQueues {
		wrong("queues", q.Queues, fmt.Sprintf("must not be greater than %d", maxQueues))
	}
	bits := int(math.Ceil(math.Log2(float64(q.Queues)) * float64(q.HandSize)))
	switch {
	case q.HandSize <= 0:
		wrong("handSize", q.HandSize, "must be positive")
	case q.HandSize > q.Queues:
		wrong("handSize", q.HandSize, fmt.Sprintf("should not be greater than queues (%d)", q.Queues))
	case bits > maxHashBits:
		wrong("handSize", q.HandSize,
			fmt.Sprintf("required entropy bits of deckSize %d and handSize %d should not be greater than %d",
				q.Queues, q.HandSize, maxHashBits))
	}
	return errs
}
