// Command hello is the example workload: a web server that says who it is, and
// that can be told to misbehave.
//
// On SIGTERM it ends without losing a request: a Service stops sending before the
// signal comes, but what was on its way by then still arrives. It is answered
// until no connection has come for -linger; only then the door closes.
//
//	GET /         "hello from POD (VERSION)" and the content of the config file
//	GET /healthz  200 once started; 503 before and while draining
//	GET /exit     ?code=N: ends the process
//	GET /hog      ?mib=N: takes that much memory and keeps it
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

type server struct {
	pod, version, config string
	ready                atomic.Bool
	exit                 chan int

	mu   sync.Mutex
	held [][]byte // memory that /hog took
}

func main() {
	listen := flag.String("listen", ":8080", "address to serve on")
	config := flag.String("config", "/etc/hello/message", "file whose content is shown; may be missing")
	slow := flag.Duration("slow-start", 0, "how long /healthz says 503 after the start")
	exitAfter := flag.Duration("exit-after", 0, "end by itself after this time; 0 = never")
	exitCode := flag.Int("exit-code", 0, "code to end with after -exit-after")
	hog := flag.Int("hog", 0, "MiB of memory to take at the start")
	linger := flag.Duration("linger", 250*time.Millisecond, "after SIGTERM, serve on until nothing has come for this long")
	drain := flag.Duration("drain", 10*time.Second, "how long all of that, and open requests, may take after SIGTERM")
	flag.Parse()

	s := &server{pod: os.Getenv("POD_NAME"), version: os.Getenv("HELLO_VERSION"), config: *config, exit: make(chan int, 1)}
	if s.pod == "" {
		s.pod, _ = os.Hostname()
	}
	if *hog > 0 {
		s.take(*hog)
	}
	time.AfterFunc(*slow, func() { s.ready.Store(true) })
	if *exitAfter > 0 {
		time.AfterFunc(*exitAfter, func() { s.end(*exitCode) })
	}
	os.Exit(s.serve(*listen, *linger, *drain))
}

// serve returns the exit code.
func (s *server) serve(listen string, linger, drain time.Duration) int {
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", s.hello)
	mux.HandleFunc("GET /healthz", s.health)
	mux.HandleFunc("GET /exit", func(w http.ResponseWriter, r *http.Request) { s.end(number(r, "code")) })
	mux.HandleFunc("GET /hog", func(w http.ResponseWriter, r *http.Request) { s.take(number(r, "mib")) })
	l, err := net.Listen("tcp", listen)
	if err != nil {
		log.Print(err)
		return 1
	}
	var callers quiet
	h := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, ConnState: callers.note}
	go func() {
		if err := h.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Print(err)
			s.end(1)
		}
	}()
	log.Printf("hello %s of pod %s serves on %s", s.version, s.pod, l.Addr())
	select {
	case code := <-s.exit:
		return code
	case <-stop.Done():
	}
	s.ready.Store(false)
	log.Print("draining")
	ctx, done := context.WithTimeout(context.Background(), drain)
	defer done()
	h.SetKeepAlivesEnabled(false) // who is answered now connects anew the next time, elsewhere
	callers.wait(ctx, linger, drain/2)
	// From here on what is still in the kernel's queue is reset and a request that was
	// read but not begun is dropped: that is how Shutdown works, and why it comes last.
	if err := h.Shutdown(ctx); err != nil {
		log.Print(err)
		return 1
	}
	return 0
}

// quiet knows when a connection or a request last came. The zero value is ready to use.
type quiet struct {
	mu   sync.Mutex
	last time.Time
}

// note is an http.Server's ConnState.
func (q *quiet) note(_ net.Conn, state http.ConnState) {
	if state != http.StateNew && state != http.StateActive {
		return
	}
	q.mu.Lock()
	q.last = time.Now()
	q.mu.Unlock()
}

// wait returns when nothing has come for linger, counted from now, or after limit: some never stop.
func (q *quiet) wait(ctx context.Context, linger, limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	begin := time.Now()
	for {
		q.mu.Lock()
		since := q.last
		q.mu.Unlock()
		if since.Before(begin) {
			since = begin
		}
		left := linger - time.Since(since)
		if left <= 0 {
			return
		}
		select {
		case <-time.After(left):
		case <-ctx.Done():
			return
		}
	}
}

func (s *server) hello(w http.ResponseWriter, r *http.Request) {
	fmt.Fprintf(w, "hello from %s (%s)\n", s.pod, s.version)
	if text, err := os.ReadFile(s.config); err == nil {
		_, _ = w.Write(text)
	}
}

func (s *server) health(w http.ResponseWriter, r *http.Request) {
	if !s.ready.Load() {
		http.Error(w, "not ready", http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

func (s *server) end(code int) {
	select {
	case s.exit <- code:
	default:
	}
}

// take touches every page, so that the memory really is used.
func (s *server) take(mib int) {
	for range mib {
		b := make([]byte, 1<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		s.mu.Lock()
		s.held = append(s.held, b)
		s.mu.Unlock()
	}
}

func number(r *http.Request, name string) int {
	n, err := strconv.Atoi(r.URL.Query().Get(name))
	if err != nil || n < 0 {
		return 0
	}
	return n
}
