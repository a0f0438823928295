package cel

import (
	"errors"
	"fmt"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/checker"
	"github.com/google/cel-go/ext"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/version"
	apiservercel "k8s.io/apiserver/pkg/cel"
	"k8s.io/apiserver/pkg/cel/environment"
	"k8s.io/apiserver/pkg/cel/library"
)

// errTooComplex is the error for a device expression with an estimated cost above the limit.
var errTooComplex = errors.New("too complex, exceeds cost limit")

// deviceEnv is the CEL environment of expressions about a device.
type deviceEnv struct {
	env    *cel.Env
	device *apiservercel.DeclType
}

// newDeviceEnv declares the variable device. Costs are estimated from the maximum sizes of its
// fields, which are those that the validation of ResourceSlices allows.
func newDeviceEnv(base *environment.EnvSet) (*deviceEnv, error) {
	const entries = resourcev1.ResourceSliceMaxAttributesAndCapacitiesPerDevice
	// An attribute is a string or a list; its type is known only at evaluation.
	attribute := withMaxSize(apiservercel.DynType,
		max(resourcev1.DeviceAttributeMaxValueLength, resourcev1.ResourceSliceMaxAttributeValuesPerDevice))
	domain, id := withMaxSize(apiservercel.StringType, resourcev1.DeviceMaxDomainLength),
		withMaxSize(apiservercel.StringType, resourcev1.DeviceMaxIDLength)
	byName := func(t *apiservercel.DeclType) *apiservercel.DeclType {
		return apiservercel.NewMapType(domain, apiservercel.NewMapType(id, t, entries), entries)
	}
	d := objectType("kubernetes.DRADevice", fieldTypes{
		"driver":                   withMaxSize(apiservercel.StringType, resourcev1.DriverNameMaxLength),
		"attributes":               byName(attribute),
		"capacity":                 byName(apiservercel.QuantityDeclType),
		"allowMultipleAllocations": apiservercel.BoolType,
	}, "driver", "attributes", "capacity", "allowMultipleAllocations")
	set, err := base.Extend(environment.VersionedOptions{
		IntroducedVersion: version.MajorMinor(1, 0), DeclTypes: []*apiservercel.DeclType{d},
		EnvOptions: []cel.EnvOption{cel.Variable("device", d.CelType()), ext.Bindings(ext.BindingsVersion(0))},
	}, environment.StrictCostOpt)
	if err != nil {
		return nil, err
	}
	return &deviceEnv{env: set.StoredExpressionsEnv(), device: d}, nil
}

func withMaxSize(t *apiservercel.DeclType, limit int) *apiservercel.DeclType {
	out := *t
	out.MaxElements = int64(limit)
	return &out
}

// estimateCost compiles an expression and returns its maximum cost. If selects is true, the
// expression is a selector: its type must be boolean or dynamic.
func (d *deviceEnv) estimateCost(text string, selects bool) (uint64, error) {
	ast, issues := d.env.Compile(text)
	if issues != nil {
		return 0, fmt.Errorf("compilation failed: %s", issues)
	}
	if t := ast.OutputType(); selects && !t.IsExactType(cel.BoolType) && !t.IsExactType(cel.DynType) {
		return 0, fmt.Errorf("must evaluate to %v or the unknown type, not %v", cel.BoolType, t)
	}
	cost, err := d.env.EstimateCost(ast, &library.CostEstimator{SizeEstimator: d})
	if err != nil {
		return 0, fmt.Errorf("cost estimation failed: %w", err)
	}
	return cost.Max, nil
}

// EstimateSize returns the maximum size of the field of the variable device that node selects; nil
// if node selects something else. It implements checker.CostEstimator.
func (d *deviceEnv) EstimateSize(node checker.AstNode) *checker.SizeEstimate {
	path := node.Path()
	if len(path) == 0 || path[0] != "device" {
		return nil
	}
	t := d.device
	for _, step := range path[1:] {
		switch f := t.Fields[step]; {
		case step == "@keys":
			t = t.KeyType
		case f != nil:
			t = f.Type
		default: // a map value, by any key
			t = t.ElemType
		}
		if t == nil {
			return nil
		}
	}
	return &checker.SizeEstimate{Max: uint64(max(0, t.MaxElements))}
}

// EstimateCallCost returns nil, so that the CEL libraries estimate the cost of calls. It implements
// checker.CostEstimator.
func (d *deviceEnv) EstimateCallCost(string, string, *checker.AstNode, []checker.AstNode) *checker.CallEstimate {
	return nil
}
