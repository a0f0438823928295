package keelson

import (
	"go/ast"
	"testing"
)

// TestConflictsAreRetriedByOnePackage fails if a loop repeats a write after a conflict. Package
// internal/retry has this loop. A loop over a list may skip objects with conflicts.
func TestConflictsAreRetriedByOnePackage(t *testing.T) {
	files, err := productionFiles()
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, f := range files {
		ast.Inspect(f.syntax, func(n ast.Node) bool {
			body := repeatedBody(n)
			if body == nil {
				return true
			}
			ast.Inspect(body, func(n ast.Node) bool {
				if call, ok := n.(*ast.CallExpr); ok && isConflictCheck(call) {
					t.Errorf("%s: a loop of its own after a conflict: use internal/retry", f.set.Position(call.Pos()))
				}
				return true
			})
			return true
		})
		ast.Inspect(f.syntax, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok && isConflictCheck(call) {
				seen++
			}
			return true
		})
	}
	if seen == 0 {
		t.Error("no call of apierrors.IsConflict was found: the test checks nothing")
	}
}

// repeatedBody returns the body of a loop that repeats an attempt: for {}, for with a condition,
// and for range N. It returns nil for a loop over elements, and for other nodes.
func repeatedBody(n ast.Node) *ast.BlockStmt {
	switch loop := n.(type) {
	case *ast.ForStmt:
		return loop.Body
	case *ast.RangeStmt:
		if loop.Key == nil {
			return loop.Body
		}
	}
	return nil
}

// isConflictCheck reports whether a call is apierrors.IsConflict.
func isConflictCheck(call *ast.CallExpr) bool {
	qualifiedName, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || qualifiedName.Sel.Name != "IsConflict" {
		return false
	}
	qualifier, ok := qualifiedName.X.(*ast.Ident)
	return ok && qualifier.Name == "apierrors"
}
