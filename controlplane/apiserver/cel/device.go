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

// errTooComplex is of expressions that could take longer for one device than all of them may.
var errTooComplex = errors.New("too complex, exceeds cost limit")

// devices is the environment of expressions over a device.
type devices struct {
	env    *cel.Env
	device *apiservercel.DeclType
}

// newDevices declares the variable device with the sizes that a ResourceSlice keeps to: costs are estimated by them.
func newDevices(base *environment.EnvSet) (*devices, error) {
	const entries = resourcev1.ResourceSliceMaxAttributesAndCapacitiesPerDevice
	// An attribute is a text or a list, and which is known when it is evaluated only.
	attribute := sized(apiservercel.DynType, max(resourcev1.DeviceAttributeMaxValueLength, resourcev1.ResourceSliceMaxAttributeValuesPerDevice))
	domain, id := sized(apiservercel.StringType, resourcev1.DeviceMaxDomainLength), sized(apiservercel.StringType, resourcev1.DeviceMaxIDLength)
	byName := func(t *apiservercel.DeclType) *apiservercel.DeclType {
		return apiservercel.NewMapType(domain, apiservercel.NewMapType(id, t, entries), entries)
	}
	d := object("kubernetes.DRADevice", fields{
		"driver":                   sized(apiservercel.StringType, resourcev1.DriverNameMaxLength),
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
	return &devices{env: set.StoredExpressionsEnv(), device: d}, nil
}

func sized(t *apiservercel.DeclType, most int) *apiservercel.DeclType {
	out := *t
	out.MaxElements = int64(most)
	return &out
}

// judge compiles an expression, a selector or one of any type, and returns what evaluating it costs at most.
func (d *devices) judge(text string, selects bool) (uint64, error) {
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

// EstimateSize is how large what the path names is at most, of what the variable device holds.
func (d *devices) EstimateSize(node checker.AstNode) *checker.SizeEstimate {
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
		default: // an item of a map, by its name or whichever
			t = t.ElemType
		}
		if t == nil {
			return nil
		}
	}
	return &checker.SizeEstimate{Max: uint64(max(0, t.MaxElements))}
}

// EstimateCallCost leaves it to the libraries what a call costs.
func (d *devices) EstimateCallCost(string, string, *checker.AstNode, []checker.AstNode) *checker.CallEstimate {
	return nil
}
