package engine

import (
	"context"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/raftstore"
)

// madeCalls counts the calls that reach a driver.
type madeCalls struct{ made int }

func (m *madeCalls) CallDriver(ctx context.Context, _, _, _ string, _ []byte, confirm func(context.Context) error) (
	[]byte, error,
) {
	if err := confirm(ctx); err != nil {
		return nil, err
	}
	m.made++
	return nil, nil
}

// F110: a leader that was replaced calls no method of a driver. The current leader has its leadership confirmed before each call.
func TestReplacedLeaderCallsNoDriver(t *testing.T) {
	confirmations, replaced := 0, false
	term := &Term{confirm: func(context.Context) error {
		confirmations++
		if replaced {
			return raftstore.ErrFenced
		}
		return nil
	}}
	calls := new(madeCalls)
	drivers := term.Drivers(calls)
	methods := 0
	for _, service := range []struct {
		of     reflect.Type
		client any
	}{
		{reflect.TypeFor[csi.ControllerClient](), DriverController(drivers, "w1", "a.example")},
		{reflect.TypeFor[csi.GroupControllerClient](), DriverGroups(drivers, "w1", "a.example")},
		{reflect.TypeFor[csi.NodeClient](), DriverNode(drivers, "w1", "a.example")},
	} {
		for i := range service.of.NumMethod() {
			m := service.of.Method(i)
			methods++
			call := func() error {
				out := reflect.ValueOf(service.client).MethodByName(m.Name).Call([]reflect.Value{
					reflect.ValueOf(context.Background()), reflect.New(m.Type.In(1).Elem())})
				err, _ := out[1].Interface().(error)
				return err
			}
			made, asked := calls.made, confirmations
			replaced = true
			if err := call(); status.Code(err) != codes.Unavailable || calls.made != made {
				t.Errorf("%s of a leader that was replaced: %d calls made, error %v", m.Name, calls.made-made, err)
			}
			replaced = false
			if err := call(); err != nil || calls.made != made+1 || confirmations != asked+2 {
				t.Errorf("%s of the leader: %d calls made, %d confirmations, error %v", m.Name, calls.made-made,
					confirmations-asked, err)
			}
		}
	}
	if methods < 20 {
		t.Errorf("only %d methods were called", methods)
	}
	// An engine that cannot confirm a leadership calls no driver.
	if err := (&Term{}).ConfirmLeadership(t.Context()); err == nil {
		t.Error("a leadership is confirmed by nobody")
	}
	if none := term.Drivers(nil); none != nil {
		t.Errorf("drivers where there are none: %v", none)
	}
}

// F110: controllers reach drivers by LeaderDrivers alone, which has the leadership confirmed.
func TestControllersCallDriversByLeaderDrivers(t *testing.T) {
	callers := 0
	err := fs.WalkDir(os.DirFS("."), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok && s.Sel.Name == "CallDriver" {
				if callers++; path != "drivers.go" {
					t.Errorf("%s calls a driver without LeaderDrivers", path)
				}
			}
			return true
		})
		return nil
	})
	if err != nil || callers != 1 {
		t.Errorf("%d places call drivers, want 1: %v", callers, err)
	}
}
