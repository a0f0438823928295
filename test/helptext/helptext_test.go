package helptext

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/cobra"
)

func compareTexts(t *testing.T, name, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s:\n got %q\nwant %q", name, got, want)
	}
}

// Cobra shows commands in the order of their names, without hidden commands and flags and
// without the commands that keep excludes.
func TestCommandTexts(t *testing.T) {
	run := func(*cobra.Command, []string) {}
	root := &cobra.Command{Use: "tool", Short: "Do something", Long: "Do something in detail."}
	get := &cobra.Command{Use: "get NAME", Short: "Show an object", Example: "  tool get a", Run: run}
	get.Flags().StringP("output", "o", "table", "format of the output")
	get.Flags().Bool("wide", false, "show more columns")
	get.Flags().Int("secret", 3, "not shown")
	if err := get.Flags().MarkHidden("secret"); err != nil {
		t.Fatal(err)
	}
	root.AddCommand(get, &cobra.Command{Use: "debug", Hidden: true, Run: run},
		&cobra.Command{Use: "apply", Short: "Create an object", Run: run},
		&cobra.Command{Use: "other", Short: "Excluded", Run: run})
	got := CommandHelp(root, func(c *cobra.Command) bool { return c.Name() != "other" })
	compareTexts(t, "help", got, `=== tool
short: Do something

Do something in detail.

=== tool apply
short: Create an object

=== tool get NAME
short: Show an object

examples:
  tool get a

flags:
  -o, --output string (default table)
      format of the output
  --wide bool
      show more columns

`)
}

// Errors shows the errors of production files. Tests, testdata and files without errors are
// left out.
func TestErrorTexts(t *testing.T) {
	t.Chdir(t.TempDir())
	for file, content := range map[string]string{
		"a/a.go": "package a\n\nfunc f() error {\n\t_ = errors.New(\"no \" + \"name\")\n" +
			"\treturn fmt.Errorf(prefix+\": %w\", fmt.Sprintf(\"%d of %d\", 1, 2), describe(err))\n}\n\n" +
			"var g = verb.NewFormError(\"want \" + describe(x))\n",
		"a/a_test.go":     "package a\n\nvar e = errors.New(\"a test\")\n",
		"a/b.go":          "package a\n",
		"testdata/bad.go": "no Go file\n",
	} {
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	compareTexts(t, "errors", ErrorTexts(t, "."), "=== a/a.go\nno name\n<prefix>: %w\nwant <describe()>\n\n")
}

func TestGoldenFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "golden")
	CompareGolden(t, file, "first\nsecond\n", true)
	CompareGolden(t, file, "first\nsecond\n", false)
	written, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	compareTexts(t, "golden file", string(written), "first\nsecond\n")
}
