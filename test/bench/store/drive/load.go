package drive

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// callTimeout bounds one call: beyond any election, so that no call fails for one.
	callTimeout = 20 * time.Second
	// afterFailure is how long a client waits before it tries again.
	afterFailure = 5 * time.Millisecond
	// endGrace is how long a load that was ended waits for calls under way. What
	// is not answered then has failed.
	endGrace = 2 * time.Second
	// keysOfClient is how many keys a client of put writes in turn.
	keysOfClient = 100
)

// Target is a store as a client sees it.
type Target interface {
	// Put writes values[i] at keys[i], all in one commit.
	Put(ctx context.Context, keys []string, values [][]byte) error
	// Get reads a key, linearizably. It must be there.
	Get(ctx context.Context, key string) error
	// List reads all keys with a prefix, with their values.
	List(ctx context.Context, prefix string) (keys int, bytes int64, err error)
	// Watch returns when a watch is set and calls seen for each put, in order, until ctx ends.
	Watch(ctx context.Context, prefix string, seen func(value []byte)) error
	// Backup reads all of the state and returns how many bytes that were.
	Backup(ctx context.Context) (bytes int64, err error)
}

// Door is one connection to one member.
type Door struct {
	Member string
	Target Target
}

// Engine makes load through its doors.
type Engine struct {
	doors []Door

	mu      sync.Mutex
	running map[int]chan struct{} // closed to end the load of an order
	watches map[string]*watching
}

// NewEngine makes an engine.
func NewEngine(doors []Door) *Engine {
	return &Engine{doors: doors, running: make(map[int]chan struct{}), watches: make(map[string]*watching)}
}

// Obey obeys an order.
func (e *Engine) Obey(ctx context.Context, o Order) Reply {
	if o.Do == DoEnd {
		e.end(o.Of)
		return Reply{}
	}
	doors := e.through(o.Through)
	if len(doors) == 0 {
		return Fail(fmt.Errorf("order %s goes through %v: no such member", o.Do, o.Through))
	}
	switch o.Do {
	case DoPut, DoGet:
		return e.loop(ctx, o, doors)
	case DoFill:
		return fill(ctx, o, doors)
	case DoList:
		return lists(ctx, o, doors[0].Target)
	case DoPace:
		return pace(ctx, o, doors[0].Target)
	case DoWatch:
		return e.watch(ctx, o, doors)
	case DoWatched:
		return e.watched(ctx, o)
	case DoBackup:
		began := time.Now()
		n, err := doors[0].Target.Backup(ctx)
		if err != nil {
			return Fail(err)
		}
		return Reply{Bytes: n, Took: time.Since(began).Seconds()}
	}
	return Fail(errors.New("unknown order " + o.Do))
}

func (e *Engine) through(members []string) []Door {
	if len(members) == 0 {
		return e.doors
	}
	var out []Door
	for _, d := range e.doors {
		if slices.Contains(members, d.Member) {
			out = append(out, d)
		}
	}
	return out
}

// Begin registers an order that goes on until it is ended: the channel is then closed.
func (e *Engine) Begin(id int) <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	ended := make(chan struct{})
	e.running[id] = ended
	return ended
}

func (e *Engine) end(id int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if ended, ok := e.running[id]; ok {
		close(ended)
		delete(e.running, id)
	}
}

// tally gathers what the clients of one order have seen.
type tally struct {
	mu    sync.Mutex
	reply Reply
}

func (t *tally) failed(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reply.Failed++
	if t.reply.Error == "" {
		t.reply.Error = err.Error()
	}
}

func (t *tally) add(micros []uint32, acks []int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reply.Micros = append(t.reply.Micros, micros...)
	t.reply.Acks = append(t.reply.Acks, acks...)
}

// loop runs clients in a closed loop: each sends its next call when the one before is answered.
func (e *Engine) loop(ctx context.Context, o Order, doors []Door) Reply {
	ended := e.Begin(o.ID)
	defer e.end(o.ID)
	began := time.Now()
	stop := time.AfterFunc(o.Duration, func() { e.end(o.ID) })
	defer stop.Stop()
	calls, abandon := context.WithCancel(ctx)
	defer abandon()
	go func() {
		select {
		case <-ended:
			time.AfterFunc(endGrace, abandon)
		case <-calls.Done():
		}
	}()
	var (
		all tally
		wg  sync.WaitGroup
	)
	for c := range o.Clients {
		wg.Go(func() { client(calls, o, c, doors[c%len(doors)].Target, ended, &all) })
	}
	wg.Wait()
	all.reply.Took = time.Since(began).Seconds()
	return all.reply
}

// client is one client of a loop.
func client(ctx context.Context, o Order, number int, target Target, ended <-chan struct{}, all *tally) {
	var (
		micros []uint32
		acks   []int64
	)
	defer func() { all.add(micros, acks) }()
	values := [][]byte{Value(o.Size)}
	keys := make([]string, keysOfClient)
	for i := range keys {
		if o.Do == DoGet {
			keys[i] = FillKey(o.Prefix, (number*keysOfClient+i)%o.Count)
		} else {
			keys[i] = fmt.Sprintf("/bench/%s/%d/%d", o.Prefix, number, i)
		}
	}
	for n := 0; ctx.Err() == nil; n++ {
		select {
		case <-ended:
			return
		default:
		}
		at := n % keysOfClient
		sent := time.Now()
		callCtx, cancel := context.WithTimeout(ctx, callTimeout)
		var err error
		if o.Do == DoPut {
			err = target.Put(callCtx, keys[at:at+1], values)
		} else {
			err = target.Get(callCtx, keys[at])
		}
		cancel()
		if err != nil {
			all.failed(err)
			select {
			case <-time.After(afterFailure):
			case <-ctx.Done():
			}
			continue
		}
		now := time.Now()
		micros = append(micros, uint32(now.Sub(sent).Microseconds()))
		if o.Times {
			acks = append(acks, now.UnixMicro())
		}
	}
}

// Value is what a put writes: bytes that do not compress.
func Value(size int) []byte {
	value := make([]byte, size, size+8)
	var word [8]byte
	for i := 0; i < size; i += 8 {
		binary.LittleEndian.PutUint64(word[:], rand.Uint64())
		copy(value[i:], word[:])
	}
	return value
}

// FillKey is the n-th key that fill puts.
func FillKey(prefix string, n int) string { return fmt.Sprintf("%s%08d", prefix, n) }

// fill puts Count keys. Values differ, so that no memory can be shared between them.
func fill(ctx context.Context, o Order, doors []Door) Reply {
	var (
		all  tally
		next atomic.Int64
		wg   sync.WaitGroup
	)
	began := time.Now()
	for c := range o.Clients {
		wg.Go(func() {
			for ctx.Err() == nil {
				first := int(next.Add(int64(o.Ops))) - o.Ops
				if first >= o.Count {
					return
				}
				var (
					keys   []string
					values [][]byte
				)
				for n := first; n < min(first+o.Ops, o.Count); n++ {
					keys = append(keys, FillKey(o.Prefix, n))
					values = append(values, Value(o.Size))
				}
				callCtx, cancel := context.WithTimeout(ctx, callTimeout)
				err := doors[c%len(doors)].Target.Put(callCtx, keys, values)
				cancel()
				if err != nil {
					all.failed(err)
					return
				}
			}
		})
	}
	wg.Wait()
	all.reply.Took = time.Since(began).Seconds()
	return all.reply
}

func lists(ctx context.Context, o Order, target Target) Reply {
	var out Reply
	began := time.Now()
	for range o.Count {
		sent := time.Now()
		keys, bytes, err := target.List(ctx, o.Prefix)
		if err != nil {
			return Fail(err)
		}
		out.Micros = append(out.Micros, uint32(time.Since(sent).Microseconds()))
		out.Keys, out.Bytes = keys, bytes
	}
	out.Took = time.Since(began).Seconds()
	return out
}
